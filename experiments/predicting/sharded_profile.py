"""The step of a profiled model if FSDP2 sharded it, predicted from a profile under a DistributedDataParallel.

Compute is the profile's. Each compressor's passes over the gradients take as long as measured, before its first round
and after it; each module takes its share of them by elements. FSDP2's copies of what it gathers and reduces are not in
a profile, and are left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from .candidates import NOOP
from .link import Network
from .predicting import compressor_of
from .profiles import GradientProfile, HookProfile, Profile
from .sharded import PLAIN, ShardedModule, sharded_step
from .sizes import Shape
from .step_time import Step, step_time


@dataclasses.dataclass(frozen=True)
class ShardedChoice:
    """A compressor in place of FSDP2's reduce-scatters, or plain FSDP2, with the predicted time of a step."""

    compressor: str
    """The compressor in text form, or `PLAIN`."""
    seconds: float
    speed_up: float
    """The predicted speed-up over plain FSDP2."""
    bytes_sent: int
    """Bytes sent per step and rank: two gathers of the blocks' parameters, one of all others, and the reduction."""

    @property
    def code(self) -> str:
        """The line that attaches it; empty: nothing is to be attached."""
        return "" if self.compressor == PLAIN else f'commhooks.attach_sharded(model, "{self.compressor}")'


@dataclasses.dataclass(frozen=True)
class _Measured:
    """The seconds that a compressor took for the gradients of a whole step, before its first round and after."""

    before: float
    after: float
    elements: int

    @classmethod
    def of(cls, hook: HookProfile, elements: int) -> _Measured:
        first = sum(bucket.rounds[0].seconds for bucket in hook.buckets)
        second = sum(bucket.rounds[1].seconds if len(bucket.rounds) > 1 else bucket.after for bucket in hook.buckets)
        return cls(first, second, elements)

    def of_shards(self, shapes: Sequence[Shape], ranks: int, copy: float) -> tuple[float, float]:
        """Return a module's share of the seconds before the first round and after it."""
        share = sum(map(math.prod, shapes)) / self.elements
        return share * self.before, share * self.after


def modules_in(gradients: Sequence[GradientProfile]) -> list[ShardedModule]:
    """Return the modules that FSDP2 would exchange one by one: numbered blocks, and last the remaining parameters.

    'blocks.3.mlp.weight' belongs to 'blocks.3'. Blocks without a matrix belong to the remaining parameters.
    """
    of_block: dict[str, list[GradientProfile]] = {}
    for gradient in gradients:
        words = gradient.name.split(".")
        within = [*itertools.takewhile(lambda word: not word.isdecimal(), words)]
        is_block = len(within) < len(words) - 1
        of_block.setdefault(".".join(words[: len(within) + 1]) if is_block else "", []).append(gradient)
    rest = of_block.pop("", [])
    for name in [name for name, own in of_block.items() if all(len(one.shape) < 2 for one in own)]:
        rest += of_block.pop(name)
    return [_module(own) for own in of_block.values()] + ([_module(rest, stays=True)] if rest else [])


def sharded_step_of(
    profile: Profile, hook: HookProfile | None, *, cores: int | None = None, overlaps: bool = False
) -> Step:
    """Return the step of a profile's model under FSDP2, with a hook of the profile or, if None, without.

    Each rank's optimizer trains its own shards. `cores` and `overlaps` are as for `sharded_step`; None: as in the
    profile. Raises `SettingsError` if the compressor cannot return shards.
    """
    elements = sum(math.prod(gradient.shape) for gradient in profile.gradients)
    noop = profile.noop
    return sharded_step(
        modules_in(profile.gradients),
        None if hook is None else compressor_of(hook),
        profile.ranks,
        compute=noop.forward + noop.backward,
        optimizer=noop.exposed + noop.optimizer / profile.ranks,
        costs=None if hook is None else _Measured.of(hook, elements),
        cores=profile.cores if cores is None else cores,
        overlaps=overlaps,
    )


def sharded_choices(profile: Profile, network: Network, *, overlaps: bool = False) -> tuple[ShardedChoice, ...]:
    """Return plain FSDP2 and each compressor of a profile that can return shards, the fastest first.

    Args:
        profile: Of the model under a DistributedDataParallel.
        network: The network between the ranks; it must know the costs of PyTorch's own collectives, as a `Link` does.
        overlaps: Whether FSDP2 computes on while it exchanges, as on a GPU.

    """
    own: dict[str, HookProfile] = {}
    for label, hook in profile.hooks.items():
        if label != NOOP and (hook.hook not in own or hook.policy == "fifo"):
            own[hook.hook] = hook
    steps = {PLAIN: sharded_step_of(profile, None, overlaps=overlaps)}
    steps |= {
        name: sharded_step_of(profile, hook, overlaps=overlaps)
        for name, hook in own.items()
        if compressor_of(hook).scatters
    }
    times = {name: step_time(step, network, profile.ranks) for name, step in steps.items()}
    found = [
        ShardedChoice(name, time.seconds, times[PLAIN].seconds / time.seconds, time.bytes_sent)
        for name, time in times.items()
    ]
    return tuple(sorted(found, key=lambda one: one.seconds))


def _module(gradients: Sequence[GradientProfile], *, stays: bool = False) -> ShardedModule:
    item = gradients[0].bytes // max(math.prod(gradients[0].shape), 1)
    return ShardedModule(tuple(one.shape for one in gradients), item=item or 4, stays=stays)
