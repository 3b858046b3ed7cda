"""The goals of a comparison's runs: a fast hook may take more steps, so that all have the same time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from commhooks.experiments.results.summary import SMOOTHING_STEPS, steps_to, target_loss, total_seconds
from commhooks.experiments.runs import Goal, RunResult, RunSettings, StepRecord
from commhooks.experiments.specs import Spec


@dataclass(frozen=True, kw_only=True)
class GoingOn:
    """The rule for goals that the runs of a comparison pursue beyond the steps asked for."""

    baseline: Spec  # the hook whose run sets the goal of the others with the same seed
    times: int  # the steps asked for that a run takes at most
    target: float | None = None  # training loss; None: by `commhooks.experiments.results.summary.TARGET_RULE`

    def goal(self, baseline: Sequence[StepRecord]) -> Goal:
        """Return the goal set by the baseline's run."""
        loss = target_loss([baseline]) if self.target is None else self.target
        return Goal(
            loss=loss if math.isfinite(loss) else None,
            seconds=total_seconds(baseline),
            steps=self.times * len(baseline),
        )

    def goals(self, runs: Sequence[RunSettings], known: Mapping[RunSettings, RunResult]) -> dict[int, Goal]:
        """Return the goals of the runs whose baseline is already finished, by their index."""
        firsts = {place: known.get(replace(settings, hook=self.baseline)) for place, settings in enumerate(runs)}
        return {
            place: self.goal(first.asked_steps)
            for place, first in firsts.items()
            if first is not None and runs[place].hook != self.baseline
        }


class Pursuit:
    """A run on its way to a goal."""

    def __init__(self, goal: Goal, steps: Sequence[StepRecord]) -> None:
        self._goal = goal
        self._made, self._seconds = len(steps), total_seconds(steps)
        self._recent = tuple(steps[-SMOOTHING_STEPS:])
        self._reached = self._reaches_target(steps)

    def add(self, step: StepRecord) -> None:
        """Count another step."""
        self._made += 1
        self._seconds += step.seconds
        self._recent = (*self._recent, step)[-SMOOTHING_STEPS:]
        self._reached = self._reaches_target(self._recent)

    @property
    def goes_on(self) -> bool:
        """True if the run takes another step: it has not reached its target or a limit, and its loss is finite."""
        left = self._made < self._goal.steps and self._seconds < self._goal.seconds
        return left and not self._reached and math.isfinite(self._recent[-1].loss)

    def _reaches_target(self, steps: Sequence[StepRecord]) -> bool:
        return self._goal.loss is not None and steps_to(self._goal.loss, steps) is not None
