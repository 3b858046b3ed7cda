"""One run in numbers: its curve of losses, its typical step, and when it reached a target."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from commhooks.experiments.runs import RunResult, StepRecord
from commhooks.experiments.specs import steps_of_a_round

SMOOTHING_STEPS = 10  # a training loss is a mean over this many steps, up to and including the step itself
CURVE_STEPS = 9  # a curve's point is a mean over this many steps, itself in the middle
TARGET_SHARE = 0.95  # the default target loss is at this fraction of the baseline's decrease in loss
TARGET_RULE = (
    f"for each seed, the loss at {100 * TARGET_SHARE:.0f} % of the baseline's decrease, from the training loss of its "
    f"first step to the mean of its last {SMOOTHING_STEPS}; a run reaches it after the first {SMOOTHING_STEPS} steps "
    "in a row (or all, if there are fewer) whose mean is at or below it; there is no target if the baseline's loss did "
    "not fall"
)


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the median and the quartiles of the values."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Typical:
    """The interquartile mean of the steps: that of the middle half by duration, so that the parts add up."""

    compute: float
    compression: float
    waiting: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.compression + self.waiting

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> Typical:
        """Return the typical step."""
        ordered = sorted(steps, key=lambda step: step.seconds)
        middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
        return cls(*(statistics.fmean(getattr(s, f.name) for s in middle) for f in dataclasses.fields(cls)))


def unprobed(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return the steps with a typical time: those not measured by layer, or all if there are none."""
    return [step for step in steps if not step.probed] or steps


def typical_steps(result: RunResult) -> Sequence[StepRecord]:
    """Return the requested steps with a typical time.

    If the hook communicates once in several steps, as DiLoCo does, each record is the mean step of a whole round, since
    most steps spend no time on communication and a few spend all of it.
    """
    every, steps = steps_of_a_round(result.settings.hook), result.asked_steps
    if every == 1:
        return unprobed(steps)
    rounds = [steps[begin : begin + every] for begin in range(0, len(steps) - every + 1, every)] or [steps]
    return [_mean_step(own) for own in rounds]


def _mean_step(steps: Sequence[StepRecord]) -> StepRecord:
    """Return the last of these steps, with the mean times of all of them."""
    names = ("seconds", "compute", "compression", "waiting", "hidden")
    means = {name: statistics.fmean(getattr(step, name) for step in steps) for name in names}
    return dataclasses.replace(steps[-1], **means)  # type: ignore[arg-type]


def smoothed_losses(steps: Sequence[StepRecord]) -> list[float]:
    """Return at every step the mean loss of up to SMOOTHING_STEPS steps, up to and including that step."""
    losses = np.array([step.loss for step in steps])
    begin = [statistics.fmean(losses[:end]) for end in range(1, min(SMOOTHING_STEPS, len(losses) + 1))]
    if len(losses) < SMOOTHING_STEPS:
        return begin
    windows = np.lib.stride_tricks.sliding_window_view(losses, SMOOTHING_STEPS)
    return [*begin, *windows.mean(axis=1).tolist()]


def total_seconds(steps: Sequence[StepRecord]) -> float:
    """Return the training time of the steps."""
    return sum(step.seconds for step in steps)


def total_bytes(steps: Sequence[StepRecord]) -> int:
    """Return the bytes moved by a rank in the steps."""
    return sum(step.moved_bytes for step in steps)


def curve_of(losses: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return at every step the mean of the surrounding losses: a curve that does not lag behind its points.

    At the ends the mean is over fewer steps, but not over one: a curve must not end with the noise of a batch.
    """
    window = np.ones(2 * min(CURVE_STEPS // 2, (len(losses) - 1) // 2) + 1)
    found: npt.NDArray[np.float64] = np.convolve(losses, window, "same")
    averaged: npt.NDArray[np.float64] = np.convolve(np.ones(len(losses)), window, "same")
    return found / averaged


def target_loss(runs: Sequence[Sequence[StepRecord]]) -> float:
    """Return the loss at TARGET_SHARE of the decrease of these runs' mean curve; NaN if it did not fall."""
    curves = [smoothed_losses(steps) for steps in runs]
    first, last = (statistics.fmean(curve[place] for curve in curves) for place in (0, -1))
    return first + TARGET_SHARE * (last - first) if last < first else math.nan


def steps_to(target: float, steps: Sequence[StepRecord]) -> int | None:
    """Return the number of steps until the smoothed loss reaches the target; None: never."""
    windows = enumerate(smoothed_losses(steps), start=1)
    return next((n for n, loss in windows if loss <= target and n >= min(SMOOTHING_STEPS, len(steps))), None)
