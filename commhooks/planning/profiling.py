"""Measure where the time of a model's steps goes, and what every hook would add: `profile`."""

from __future__ import annotations

import functools
import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from commhooks.communicators.ranks import Ranks
from commhooks.errors import ProfileError, SettingsError
from commhooks.hooks.attach import Attachment, attach, check_is_free
from commhooks.hooks.stateless import group_or_default
from commhooks.language.compressor import Compressor
from commhooks.planning.candidates import NOOP, Candidate, default_candidates, with_the_two
from commhooks.planning.keeping import Kept
from commhooks.planning.measuring import Brief, StepRecord, buckets_of, longest, parts_of, ready_of
from commhooks.planning.phases import PhaseWatch
from commhooks.planning.place import free_cores, machine_in_words, places_of, ranks_per_host
from commhooks.planning.profile import GradientProfile, HookProfile, Profile
from commhooks.planning.segments import Segments, Watched, WatchedCommunicator
from commhooks.scheduling.scheduler import POLICIES
from commhooks.unwrapping import find_ddp, trained_parameters

PLAIN = "plain"
"""The label of steps under the DDP's own all-reduce."""
LEAST_STEPS = 3
"""A median of fewer says nothing of their spread."""
_MOST_STEPS = 42  # of each hook, unless the user asks for more
_STEPS_OF_A_TURN = 3  # that count; one before them does not, in which a hook that was replaced lays out its memory
MIB = 2**20
_DEFAULT_CAP = 25.0  # MiB, of both DDPs
_WARM_UP = 2  # steps: the DDP rebuilds its buckets after the first


def profile(
    model: Module,
    step_fn: Callable[[], object],
    *,
    hooks: Iterable[Candidate | Compressor | str] | None = None,
    steps: int | None = None,
    seconds: float = 60.0,
    name: str = "",
) -> Profile:
    """Measure where the time of a training step goes, and what every hook would add to it without a link.

    Call it on every rank, between two steps. `model` is a DistributedDataParallel, ddp_core's or PyTorch's, or what
    wraps one; `step_fn()` runs one whole step of this rank: it takes a batch, and runs the forward pass, the backward
    pass and the optimizer.

    At first some steps run as they are, under the DDP's own all-reduce. Then every hook has its turns, again and again,
    a few steps each, so that other load on the machine slows all of them alike. In these steps nothing is sent: each
    collective is answered at once with what this rank put in. They hold all that a hook costs except transfers: thread
    hand-offs, memory traffic, and the contention of worker and training thread.

    - `hooks`: what to measure besides noop and all-reduce; None: `default_candidates()`. Each is a `Candidate`, which
      has a policy, or whatever `attach` takes.
    - `steps`: how many steps of each hook count, at least 3; None: as many as fit into `seconds`, up to 42.
    - `seconds`: how long to measure, if `steps` is None.
    - `name`: the model in reports; empty: its class.

    Afterwards parameters, buffers, gradients and optimizer states are as before: they are copied first, which takes as
    much memory again as they do. Optimizers are found when they step, if they are `torch.optim.Optimizer`s. What else
    `step_fn` changes stays changed: data iterators, learning-rate schedules, random number generators and loss scales
    advance. PyTorch's DistributedDataParallel accepts one hook in its life, so from then on it averages with this
    package's all-reduce, and takes `attach` but no `register_comm_hook`; ddp_core's is as before.

    Returns the same profile on every rank.

    Raises:
        AttachError: The model is not a DistributedDataParallel, or a hook is attached or registered.
        ProfileError: `step_fn` failed; the message names the rank. In a step under the DDP's own all-reduce, other
            ranks may wait for the failed one as they would in training, until its process ends.
        SettingsError: A setting cannot work, parameters are not on the CPU, or the steps do not fit into `seconds`.

    """
    ddp = find_ddp("profile", model)
    check_is_free("profile", ddp)
    candidates = with_the_two(default_candidates() if hooks is None else hooks)
    named = trained_parameters(model, ddp)
    _check(named, steps, seconds)
    measured = _Measured(ddp, model, named, step_fn, candidates, steps, seconds)
    with _as_before(measured.kept):
        measured.run()
    return measured.profile(name or type(ddp.module).__name__)


def _check(named: Sequence[tuple[str, Tensor]], steps: int | None, seconds: float) -> None:
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < LEAST_STEPS):
        raise SettingsError(f"profile(steps={steps!r}): steps must be a whole number of at least {LEAST_STEPS}.")
    if not 0 < seconds < math.inf:
        raise SettingsError(f"profile(seconds={seconds!r}): seconds must be above zero, and finite.")
    elsewhere = next(((name, p.device) for name, p in named if p.device.type != "cpu"), None)
    if elsewhere is not None:
        raise SettingsError(
            f"profile: parameter {elsewhere[0]!r} is on {elsewhere[1]}, where kernels run after the calls that start "
            "them have returned; profile measures on the CPU. Use torch.profiler there."
        )


@contextmanager
def _as_before(kept: Kept) -> Iterator[None]:
    """Put everything back at the end."""
    try:
        yield
    finally:
        kept.restore()


class _Measured:
    """The steps of one profile on this rank."""

    def __init__(
        self,
        ddp: Module,
        model: Module,
        named: Sequence[tuple[str, Tensor]],
        step: Callable[[], object],
        candidates: Sequence[Candidate],
        steps: int | None,
        seconds: float,
    ) -> None:
        self.ddp, self.model, self.named, self.step = ddp, model, named, step
        self.candidates = candidates
        self.kept = Kept(ddp)
        self.ranks = Ranks(group_or_default(getattr(ddp, "process_group", None)), ProfileError)
        self.watch = PhaseWatch(ddp, [p for _, p in named], self.kept.keep_optimizer)
        self.records: dict[str, list[StepRecord]] = {}
        self.state_bytes: dict[str, int] = {}
        self.places = places_of(self.ranks)
        self._steps, self._until = steps, time.perf_counter() + seconds
        self._seconds = seconds

    def run(self) -> None:
        """Measure everything."""
        with self.watch:
            self._try_a_step()
            self._measure_plain()
            policies = [p for p in POLICIES if any(one.policy == p for one in self.candidates)]
            for number, policy in enumerate(policies):
                self._measure_hooks(policy, blocks_left=len(policies) - number)

    def _try_a_step(self) -> None:
        """Run a step that sends nothing: if it fails, no other rank waits in a collective for this one."""
        if getattr(self.ddp, "static_graph", False):  # its first step must synchronise
            return
        ddp: Any = self.ddp
        synchronises_buffers, ddp.require_forward_param_sync = ddp.require_forward_param_sync, False
        with ddp.no_sync():
            self._take_together("take a first step")
        ddp.require_forward_param_sync = synchronises_buffers
        self.kept.restore()

    def _measure_plain(self) -> None:
        for _ in range(_WARM_UP):
            seconds = self._take_plain().phases.seconds
        share = (self._until - time.perf_counter()) / (len(self.candidates) + 1)
        count = self._agreed(self._steps or min(_MOST_STEPS, max(LEAST_STEPS, int(share / seconds))))
        self.records[PLAIN] = [self._take_plain() for _ in range(count)]
        self.kept.restore()

    def _measure_hooks(self, policy: str, blocks_left: int) -> None:
        """Measure the hooks of one policy in turns."""
        segments = Segments(time.thread_time if free_cores(self.places) == 1 else time.perf_counter)
        own = [one for one in self.candidates if one.policy == policy]
        watched = {one.label: Watched(inner=one.compressor, segments=segments) for one in own}
        attachment = attach(
            self.model,
            watched[own[0].label],
            policy=policy,
            wrap_communicator=functools.partial(WatchedCommunicator, segments=segments),
        )
        try:
            seconds = {label: self._first_steps(attachment, label, one) for label, one in watched.items()}
            for steps in self._turns(seconds, blocks_left):
                for label, one in watched.items():
                    attachment.replace(one)
                    self.kept.restore()
                    self._take_hooked(label, segments)
                    self.records.setdefault(label, []).extend(self._take_hooked(label, segments) for _ in range(steps))
        finally:
            attachment.detach()

    def _first_steps(self, attachment: Attachment, label: str, compressor: Watched) -> float:
        """Run a hook's first steps, in which it allocates; return the seconds of the last, on rank 0."""
        attachment.replace(compressor)
        self.kept.restore()
        for _ in range(_WARM_UP):
            record = self._take_hooked(label, compressor.segments)
        self.state_bytes[label] = _state_bytes(attachment, compressor, self.named, self.ranks.world_size)
        if label == NOOP and self._steps is None:
            self._check_budget(record.phases.seconds)
        return record.phases.seconds

    def _check_budget(self, noop: float) -> None:
        """Raise if not even the least number of steps fits, were all hooks as fast as noop."""
        needed = noop * (LEAST_STEPS + 1 + _WARM_UP) * len(self.candidates)
        left, needed = self._agreed((self._until - time.perf_counter(), needed))
        if needed > left:
            raise SettingsError(
                f"profile(seconds={self._seconds:g}): a step takes {noop:.2g} s without communication, so "
                f"{LEAST_STEPS} steps of each of {len(self.candidates)} hooks take at least {needed:.0f} s more than "
                f"the {self._seconds - max(left, 0.0):.0f} s that have passed; give more seconds, or fewer hooks."
            )

    def _turns(self, seconds: Mapping[str, float], blocks_left: int) -> list[int]:
        """Return how many steps count in each turn, the same on all ranks."""
        if self._steps is None:
            left = (self._until - time.perf_counter()) / blocks_left
            turns = int(left / (sum(seconds.values()) * (1 + _STEPS_OF_A_TURN)))
            count = self._agreed(min(_MOST_STEPS, max(LEAST_STEPS, turns * _STEPS_OF_A_TURN)))
        else:
            count = self._steps
        return [min(_STEPS_OF_A_TURN, count - begun) for begun in range(0, count, _STEPS_OF_A_TURN)]

    def _agreed(self, value: Any) -> Any:
        """Return rank 0's value."""
        return self.ranks.first("agree about the number of steps", lambda: value)

    def _take_plain(self) -> StepRecord:
        """Take a step under the DDP's own all-reduce."""
        dist.barrier(self.ranks.group)
        try:
            phases = self.watch.watch(self.step)
        except Exception as error:  # whatever the user's step raises
            raise ProfileError(
                f"profile: could not take a step under the plain all-reduce. rank {self.ranks.rank}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return StepRecord(phases, [], [], phases.own_seconds)

    def _take_hooked(self, label: str, segments: Segments) -> StepRecord:
        """Take a step under a hook; raise on every rank if it fails on any."""
        segments.begin_step()
        phases = self._take_together(f"take a step under {label}")
        if not segments.buckets:
            raise SettingsError(
                "profile: no gradient passed through the hook; step_fn must call the model that was passed, and run "
                "its last backward pass outside no_sync()."
            )
        own = phases.own_seconds + segments.own_seconds
        return StepRecord(phases, segments.buckets, segments.spans, own)

    def _take_together(self, what: str) -> Any:
        dist.barrier(self.ranks.group)
        found: list[Any] = []
        self.ranks.each(what, lambda: found.append(self.watch.watch(self.step)))
        return found[0]

    def profile(self, name: str) -> Profile:
        """Return the profile, which all ranks make of the same figures."""
        brief = {label: [one.brief(len(self.named)) for one in steps] for label, steps in self.records.items()}
        of_ranks: list[dict[str, list[Brief]]] = self.ranks.gather("exchange what was measured", lambda: brief)
        steps = {label: longest([one[label] for one in of_ranks]) for label in brief}
        hooks = {
            one.label: HookProfile(
                one.hook,
                one.policy,
                parts_of(steps[one.label]),
                buckets_of(one.label, steps[one.label]),
                self.state_bytes[one.label],
            )
            for one in self.candidates
        }
        noop = steps[NOOP]
        return Profile(
            model=name,
            fingerprint=fingerprint_of(self.named),
            ranks=self.ranks.world_size,
            ranks_per_host=ranks_per_host(self.places),
            ddp="torch" if isinstance(self.ddp, torch.nn.parallel.DistributedDataParallel) else "core",
            cores=free_cores(self.places),
            plain=parts_of(steps[PLAIN]),
            noop=hooks[NOOP].step,
            gradients=_gradients(self.named, noop),
            hooks=hooks,
            own_share=sum(step.own_seconds for step in noop) / sum(step.seconds for step in noop),
            bucket_cap_mb=_bucket_cap(self.ddp),
            versions=_versions(),
            machine=machine_in_words(),
        )


def fingerprint_of(named: Sequence[tuple[str, Tensor]]) -> str:
    """Return a hash of the names, shapes and dtypes of parameters."""
    text = "\n".join(f"{name} {tuple(parameter.shape)} {parameter.dtype}" for name, parameter in named)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gradients(named: Sequence[tuple[str, Tensor]], noop: Sequence[Brief]) -> tuple[GradientProfile, ...]:
    """Return the gradients in the order in which they become ready; those that never do are left out."""
    ready = ready_of(noop)
    order = [int(number) for number in np.argsort(ready, kind="stable") if not np.isnan(ready[number])]
    return tuple(
        GradientProfile(name, tuple(p.shape), p.numel() * p.element_size(), float(ready[number]))
        for number, (name, p) in ((number, named[number]) for number in order)
    )


def _state_bytes(
    attachment: Attachment, compressor: Watched, named: Sequence[tuple[str, Tensor]], world_size: int
) -> int:
    """Return the bytes of what one of the compressors that an attachment has had declares."""
    total = 0
    for name, parameter in named:
        declared = {*compressor.state(name, parameter, world_size), *compressor.segments.entries_of_buckets}
        tensors = attachment.state.of(parameter).tensors
        total += sum(t.numel() * t.element_size() for entry, t in tensors.items() if entry in declared)
    return total


def _bucket_cap(ddp: Any) -> float | None:
    """Return the size of buckets in MiB; None: the default."""
    cap: float = ddp.bucket_bytes_cap / MIB
    is_default = getattr(ddp, "bucket_bytes_cap_default", cap == _DEFAULT_CAP)
    return None if is_default else cap


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "commhooks": metadata.version("commhooks")}
