"""An estimate of the remaining time, from the steps made so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..links.link import LinkSettings
from ..runs import RunResult, RunSettings
from ..training.worker import Evaluated, RunDone, StepDone

Kind = tuple[object, ...]

# What a step's duration depends on, most important first.
_KIND = ("task", "ranks", "hook", "link", "optimizer", "compute", "ddp", "bucket_cap_mb", "evaluate_every")
_LINK = _KIND.index("link")


@dataclass
class _Turns:
    """The turns so far of runs of one kind, which differ only in seed and number of steps."""

    seconds: float = 0.0  # on this machine, evaluation included
    steps: int = 0
    moved_bytes: int = 0


class Pace:
    """The remaining time of runs that take turns.

    A run's turn is the time from the previous message of any run to its own. A run that has not begun is expected to
    take as long as runs of its kind (with other seeds). If there are none, it takes as long as the most similar kind,
    minus the time of the bytes on that kind's link, plus their time on this one.
    """

    def __init__(
        self,
        runs: Sequence[RunSettings],
        finished: Mapping[RunSettings, RunResult],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._kinds = {settings: tuple(getattr(settings, name) for name in _KIND) for settings in runs}
        self._scenes = {settings: settings.scene for settings in runs}
        self._left = {settings: settings.steps for settings in runs if settings not in finished}  # in steps
        self._left_of_kind = dict.fromkeys(self._kinds.values(), 0)
        for settings, steps in self._left.items():
            self._left_of_kind[self._kinds[settings]] += steps
        self._turns: dict[Kind, _Turns] = {}
        self._to_begin = {self._scenes[settings] for settings in self._left}
        self._begun: dict[RunSettings, float] = {}  # by scene, seconds until every run had made its first step
        self._heard = clock()
        self._going_on = False  # whether the last step was one after those asked for: nobody knows how many follow
        for settings, result in finished.items():
            if settings in self._kinds:
                turns = self._turns.setdefault(self._kinds[settings], _Turns())
                turns.seconds += result.dilation * sum(step.seconds for step in result.steps)
                turns.steps += len(result.steps)
                turns.moved_bytes += sum(step.moved_bytes for step in result.steps)

    def hear(self, settings: RunSettings, message: object) -> None:
        """Record a message from a run."""
        now = self._clock()
        turn, self._heard = now - self._heard, now
        if isinstance(message, StepDone) and message.again:
            self._to_begin.discard(self._scenes[settings])
        elif isinstance(message, StepDone) and message.record.step == 1:
            # Starting the ranks and loading the task are part of it: it says nothing about the steps to come.
            scene = self._scenes[settings]
            self._to_begin.discard(scene)
            self._begun[scene] = self._begun.get(scene, 0.0) + turn
        elif isinstance(message, StepDone | Evaluated | RunDone):  # not a failure, which may be a long silence
            turns = self._turns.setdefault(self._kinds[settings], _Turns())
            turns.seconds += turn
            if isinstance(message, StepDone):
                turns.steps += 1
                turns.moved_bytes += message.record.moved_bytes
        if isinstance(message, StepDone):
            left = settings.steps - message.record.step
            self._set_left(settings, max(0, left))
            self._going_on = left < 0

    def end(self, settings: RunSettings) -> None:
        """Expect nothing more of this run."""
        self._set_left(settings, 0)
        self._to_begin.discard(self._scenes[settings])

    def seconds_left(self) -> float | None:
        """Return the seconds until all runs have taken their steps; None if no step was measured, or one continues."""
        measured = {kind: turns for kind, turns in self._turns.items() if turns.steps}
        if not measured or self._going_on:
            return None
        seconds = sum(steps * _expected_turn(kind, measured) for kind, steps in self._left_of_kind.items() if steps)
        if len(self._begun) > 1:  # the first had to wait for the processes, which most scenes find running
            seconds += len(self._to_begin) * list(self._begun.values())[-1]
        return max(0.0, seconds - (self._clock() - self._heard))

    def _set_left(self, settings: RunSettings, steps: int) -> None:
        self._left_of_kind[self._kinds[settings]] += steps - self._left.get(settings, 0)
        self._left[settings] = steps


def _expected_turn(kind: Kind, measured: Mapping[Kind, _Turns]) -> float:
    """Return the mean turn of the most similar kind, on this kind's link."""
    nearest = max(measured, key=lambda other: [mine == its for mine, its in zip(kind, other, strict=True)])
    turns = measured[nearest]
    bits = 8 * turns.moved_bytes / turns.steps
    on_the_link = bits * (_seconds_per_bit(kind) - _seconds_per_bit(nearest))
    return max(0.0, turns.seconds / turns.steps + on_the_link)


def _seconds_per_bit(kind: Kind) -> float:
    link = kind[_LINK]
    assert isinstance(link, LinkSettings), "the place of the link among the fields"
    return 1 / link.slowest if link.slowest else 0.0
