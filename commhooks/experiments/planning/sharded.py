"""The step of a profiled model if FSDP2 sharded it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from commhooks.experiments.planning.profiles import GradientProfile, HookProfile, Profile
from commhooks.experiments.timing.sharded import ShardCosts, ShardedModule, sharded_step
from commhooks.experiments.timing.step_time import Step
from commhooks.making import compressor_in_file


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


def sharded_step_of(profile: Profile, hook: HookProfile | None) -> Step:
    """Return the step of a profile's model under FSDP2, with a hook of the profile or, if None, without.

    Compute is the profile's, and each rank's optimizer trains its own shards. The compressor's passes take as long as
    in the profile, before its first round and after it, and each module takes its share of them by elements. FSDP2's
    own copies are left out. Raises `SettingsError` if the compressor cannot return shards.
    """
    elements = sum(math.prod(gradient.shape) for gradient in profile.gradients)
    noop = profile.noop
    return sharded_step(
        modules_in(profile.gradients),
        None if hook is None else compressor_in_file(hook.hook),
        profile.ranks,
        compute=noop.forward + noop.backward,
        optimizer=noop.exposed + noop.optimizer / profile.ranks,
        costs=None if hook is None else _costs_of(hook, elements),
        cores=profile.cores,
    )


def _costs_of(hook: HookProfile, elements: int) -> ShardCosts:
    """Return the costs of a profile's hook, for a model of this many elements."""
    first = sum(bucket.rounds[0].seconds for bucket in hook.buckets)
    second = sum(bucket.rounds[1].seconds if len(bucket.rounds) > 1 else bucket.after for bucket in hook.buckets)
    return ShardCosts(first, second, elements)


def _module(gradients: Sequence[GradientProfile], *, stays: bool = False) -> ShardedModule:
    item = gradients[0].bytes // max(math.prod(gradients[0].shape), 1)
    return ShardedModule(tuple(one.shape for one in gradients), item=item or 4, stays=stays)
