"""The steps of a profile on one rank: every setting has its turns, a few steps each, again and again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from commhooks.communicators.parent_group import group_or_default
from commhooks.communicators.ranks import Ranks
from commhooks.errors import SettingsError
from commhooks.exchange.handle import Handle
from commhooks.experiments.devices import Stopwatch, idle_clock
from commhooks.experiments.planning.candidates import NOOP, Candidate
from commhooks.experiments.planning.errors import ProfileError
from commhooks.experiments.planning.keeping import Kept
from commhooks.experiments.planning.measuring import StepRecord
from commhooks.experiments.planning.phases import Phases, PhaseWatch
from commhooks.experiments.planning.place import Place as RanksPlace
from commhooks.experiments.planning.place import free_cores, places_of
from commhooks.experiments.planning.segments import Segments, Watched
from commhooks.experiments.timing.pretending import PretendingConnection, attach_pretending
from commhooks.language.place import Place
from commhooks.language.requests import Layout
from commhooks.scheduling.policy import POLICIES, PolicyName

PLAIN = "plain"
"""The label of steps under the DDP's own all-reduce."""
LEAST_STEPS = 3
"""A median of fewer says nothing of their spread. As many of each setting follow one another in a turn."""
MOST_STEPS = 42
"""The most steps of each setting, unless the user asks for more."""
_FIRST_STEPS = 2  # that do not count: the DDP rebuilds its buckets after its first, a hook allocates in its first
_GRADIENTS_AT_THE_END = 3  # of which one is the last, in every step


class Turns:
    """Takes the steps, and keeps what was measured in them.

    Passes follow one another; in each of them every setting has one turn. So other load on the machine, which comes and
    goes, hits all settings alike.
    """

    def __init__(
        self,
        ddp: Module,
        named: Sequence[tuple[str, Tensor]],
        step: Callable[[], object],
        candidates: Sequence[Candidate],
        kept: Kept,
        group: dist.ProcessGroup,
        as_ranks: int | None,
    ) -> None:
        self.ranks: Ranks = Ranks(group, ProfileError)
        self.world_size: int = as_ranks or self.ranks.world_size
        """The number of ranks, real or pretended, under a hook."""
        self.places: list[RanksPlace] = places_of(self.ranks)
        self.cores: int = free_cores(self.places)
        self.records: dict[str, list[StepRecord]] = {PLAIN: [], **{one.label: [] for one in candidates}}
        self.state_bytes: dict[str, int] = {}
        self._ddp, self._named, self._step = ddp, named, step
        self._candidates = candidates
        self._kept = kept
        device = named[0][1].device
        self._stopwatch = Stopwatch(device)
        self._clock = functools.partial(idle_clock, device) if self._stopwatch.is_queued else time.perf_counter
        self._watch = PhaseWatch([p for _, p in named], kept.keep_optimizer, self._stopwatch)
        self._last_gradients: list[Tensor] = []

    def run(self, steps: int | None, seconds: float) -> None:
        """Take `steps` steps of each setting, or as many as fit into `seconds`."""
        self._agree(steps)
        until = time.perf_counter() + seconds
        with self._watch:
            self._try_a_step()
            plain = [self._take_plain() for _ in range(_FIRST_STEPS)][-1].phases
            self._last_gradients = [self._named[n][1] for _, n in plain.gradients[-_GRADIENTS_AT_THE_END:]]
            if not self._is_plain_again:
                count = min(MOST_STEPS, int((until - time.perf_counter()) / (len(self.records) * plain.seconds)))
                self._plain_turn(self._of_rank_0(steps or max(LEAST_STEPS, count)))
            begun = time.perf_counter()
            self._pass(LEAST_STEPS, until if steps is None else None)
            more = (until - time.perf_counter()) / (time.perf_counter() - begun) * LEAST_STEPS
            left = self._of_rank_0(int(min(MOST_STEPS - LEAST_STEPS, more)) if steps is None else steps - LEAST_STEPS)
            for done in range(0, left, LEAST_STEPS):
                self._pass(min(LEAST_STEPS, left - done))

    def _agree(self, steps: int | None) -> None:
        """Raise `SettingsError` on every rank if ranks would take other steps, and wait for ever."""
        asked = f"steps={steps}, hooks={', '.join(self.records)}, as_ranks={self.world_size}"
        told = self.ranks.gather("say what to measure", lambda: asked)
        if len(set(told)) > 1:
            raise SettingsError(f"profile: ranks disagree about steps or hooks; by rank: {'; '.join(told)}.")

    @property
    def _is_plain_again(self) -> bool:
        """True if the DDP goes back to its own all-reduce after a hook, as ddp_core's does."""
        return hasattr(self._ddp, "remove_comm_hook")

    def _try_a_step(self) -> None:
        """Run a step that sends nothing: if it fails, no other rank waits in a collective for this one."""
        ddp: Any = self._ddp
        if getattr(ddp, "static_graph", False):  # its first step must synchronise
            return
        synchronises_buffers, ddp.require_forward_param_sync = ddp.require_forward_param_sync, False
        try:
            with ddp.no_sync():
                self._take_together("take a first step")
        finally:
            ddp.require_forward_param_sync = synchronises_buffers
        self._kept.restore()

    def _pass(self, steps: int, until: float | None = None) -> None:
        """Give every setting a turn of this many steps; the first pass should end by the moment `until`."""
        is_first = len(self.records[NOOP]) == 0
        if self._is_plain_again:
            if not is_first:
                self._take_plain()
            self._plain_turn(steps)
        for policy in POLICIES:
            if own := [one for one in self._candidates if one.policy == policy]:
                self._hooked_turns(policy, own, steps, until)

    def _plain_turn(self, steps: int) -> None:
        self.records[PLAIN] += [self._take_plain() for _ in range(steps)]
        self._kept.restore()

    def _hooked_turns(self, policy: PolicyName, own: Sequence[Candidate], steps: int, until: float | None) -> None:
        """Let every hook of a policy have its turn: attaching costs more than to replace one hook by another."""
        is_shared = self.cores == 1 and not self._stopwatch.is_queued
        segments = Segments(time.thread_time if is_shared else self._clock, self._stopwatch)
        watched = {one.label: Watched(inner=one.compressor, segments=segments) for one in own}
        connection = PretendingConnection(group_or_default(self.ranks.group), self.world_size, segments, policy=policy)
        attachment = attach_pretending(self._ddp, watched[own[0].label], connection)
        attachment.expect(*watched.values())  # so that what waits for the next turn is not warned of
        try:
            for label, compressor in watched.items():
                attachment.replace(compressor)
                self._watch.listen([p for _, p in self._named] if label == NOOP else self._last_gradients)
                self._first_steps(attachment, label, compressor, until)
                self.records[label] += [self._take_hooked(label, segments) for _ in range(steps)]
                self._kept.restore()
        finally:
            attachment.close()
            self._watch.listen([p for _, p in self._named])

    def _first_steps(self, attachment: Handle[Any], label: str, compressor: Watched, until: float | None) -> None:
        """Take steps that do not count, because memory is allocated in them."""
        for _ in range(1 if self.records[label] else _FIRST_STEPS):
            record = self._take_hooked(label, compressor.segments)
        self.state_bytes[label] = _state_bytes(attachment, compressor, self._named, self.world_size)
        if label == NOOP and until is not None:
            self._check_budget(record.phases.seconds, until)

    def _check_budget(self, noop: float, until: float) -> None:
        """Raise if not even the least number of steps fits, were all hooks as fast as noop."""
        number = len(self._candidates)
        needed = noop * (LEAST_STEPS + _FIRST_STEPS) * number
        missing = self._of_rank_0(time.perf_counter() + needed - until)
        if missing > 0:
            raise SettingsError(
                f"profile: {LEAST_STEPS} steps of each of {number} hooks do not fit into the time: without "
                f"communication a step takes {noop:.2g} s; give at least {missing:.0f} seconds more, or fewer hooks."
            )

    def _of_rank_0(self, value: Any) -> Any:
        """Return rank 0's value: ranks must not disagree about the number of steps."""
        return self.ranks.first("agree about the number of steps", lambda: value)

    def _take_plain(self) -> StepRecord:
        """Take a step under the DDP's own all-reduce."""
        dist.barrier(self.ranks.group)
        try:
            phases = self._watch.watch(self._step)
        except Exception as error:  # whatever the user's step raises
            raise ProfileError(
                f"profile: could not take a step under the plain all-reduce. rank {self.ranks.rank}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return StepRecord(phases, [], phases.own_seconds)

    def _take_hooked(self, label: str, segments: Segments) -> StepRecord:
        """Take a step under a hook."""
        segments.begin_step()
        phases = self._take_together(f"take a step under {label}")
        segments.end_step()
        if not segments.buckets:
            raise SettingsError(
                "profile: no gradient passed through the hook; step_fn must call the model that was passed, and run "
                "its last backward pass outside no_sync()."
            )
        return StepRecord(phases, segments.buckets, phases.own_seconds + segments.own_seconds)

    def _take_together(self, what: str) -> Phases:
        """Take a step that sends nothing; raise on every rank if it fails on any."""
        dist.barrier(self.ranks.group)
        found: list[Phases] = []
        self.ranks.each(what, lambda: found.append(self._watch.watch(self._step)))
        return found[0]


def _state_bytes(
    attachment: Handle[Any], compressor: Watched, named: Sequence[tuple[str, Tensor]], world_size: int
) -> int:
    """Return the bytes of what one of the compressors that an attachment has had declares."""
    bucket = Layout(tuple(name for name, _ in named), tuple(parameter.numel() for _, parameter in named))
    total = 0
    for name, parameter in named:  # any may lead a bucket
        declared = compressor.state(Place(name, parameter, world_size, bucket=bucket))
        tensors = attachment.state.of(parameter).tensors
        total += sum(t.numel() * t.element_size() for entry, t in tensors.items() if entry in declared)
    return total
