"""Summaries for comparing runs: one Summary per run, relative to the first hook's run."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .runs import RunResult, RunSettings, StepRecord

SMOOTHING_STEPS = 10  # a training loss is a mean over this many steps, up to and including the step itself
TARGET_SHARE = 0.95  # the default target loss is at this fraction of the first hook's decrease in loss
TARGET_RULE = (
    f"the loss at {100 * TARGET_SHARE:.0f} % of the first hook's decrease, from the training loss of its first step to "
    f"the mean of its last {SMOOTHING_STEPS}; a run reaches it after the first {SMOOTHING_STEPS} "
    "steps in a row whose mean is at or below it"
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
    """The mean of the middle half of the steps, by duration: robust like a median, and its parts add up."""

    compute: float
    compression: float
    waiting: float
    hidden: float

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


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run in numbers; seconds are training time (without evaluation), bytes are those moved by one rank."""

    task: str
    hook: str
    steps: int
    train_loss: float  # mean of the last steps
    held_out_loss: float
    metrics: Mapping[str, float]  # on held-out data, besides the loss: "accuracy" (0 to 1), "bits_per_byte", ...
    seconds: float  # the whole run, warm-up included
    moved_bytes: int
    ratio: float  # dense bytes over moved bytes, the whole run, warm-up included
    step: Spread  # seconds
    compute: Spread
    compression: Spread
    waiting: Spread
    typical: Typical
    speed_up: float  # the first hook's seconds over this one's, the whole run
    step_speed_up: float  # the same for the median step
    target_loss: float
    steps_to_target: int | None
    seconds_to_target: float | None
    bytes_to_target: int | None
    replicas_identical: bool


def summarise(results: Sequence[RunResult], target_loss: float | None = None) -> list[Summary]:
    """Return a summary of every run, in the given order; a task's first run is the baseline for its others.

    Args:
        results: Runs of one task or several.
        target_loss: The loss to reach; None: by TARGET_RULE, for each task.

    """
    firsts: dict[RunSettings, RunResult] = {}
    for result in results:
        firsts.setdefault(result.settings.scene, result)
    return [_summary(result, firsts[result.settings.scene], target_loss) for result in results]


def smoothed_losses(steps: Sequence[StepRecord]) -> list[float]:
    """Return at every step the mean loss of up to SMOOTHING_STEPS steps, up to and including that step."""
    losses = [step.loss for step in steps]
    windows = (losses[max(0, end - SMOOTHING_STEPS) : end] for end in range(1, len(losses) + 1))
    return [statistics.fmean(window) for window in windows]


def total_seconds(steps: Sequence[StepRecord]) -> float:
    """Return the training time of the steps."""
    return sum(step.seconds for step in steps)


def total_bytes(steps: Sequence[StepRecord]) -> int:
    """Return the bytes moved by a rank in the steps."""
    return sum(step.moved_bytes for step in steps)


def _summary(result: RunResult, first: RunResult, target_loss: float | None) -> Summary:
    steps = result.steps
    evaluation = result.evaluations[-1]
    target = _default_target(first.steps) if target_loss is None else target_loss
    reached = _steps_to(steps, target)
    step = Spread.of([s.seconds for s in steps])
    moved = total_bytes(steps)
    return Summary(
        task=result.settings.task.label,
        hook=result.settings.hook.label,
        steps=len(steps),
        train_loss=smoothed_losses(steps)[-1],
        held_out_loss=evaluation.loss,
        metrics=evaluation.metrics,
        seconds=total_seconds(steps),
        moved_bytes=moved,
        ratio=sum(s.dense_bytes for s in steps) / moved if moved else float("inf"),
        step=step,
        compute=Spread.of([s.compute for s in steps]),
        compression=Spread.of([s.compression for s in steps]),
        waiting=Spread.of([s.waiting for s in steps]),
        typical=Typical.of(steps),
        speed_up=total_seconds(first.steps) / total_seconds(steps),
        step_speed_up=statistics.median(s.seconds for s in first.steps) / step.median,
        target_loss=target,
        steps_to_target=reached,
        seconds_to_target=None if reached is None else total_seconds(steps[:reached]),
        bytes_to_target=None if reached is None else total_bytes(steps[:reached]),
        replicas_identical=result.replicas_identical,
    )


def _default_target(steps: Sequence[StepRecord]) -> float:
    """Return the loss defined by TARGET_RULE."""
    losses = smoothed_losses(steps)
    return losses[0] + TARGET_SHARE * (losses[-1] - losses[0])


def _steps_to(steps: Sequence[StepRecord], target: float) -> int | None:
    """Return after how many steps the smoothed loss reaches the target; None: never."""
    full_windows = enumerate(smoothed_losses(steps), start=1)
    return next((n for n, loss in full_windows if loss <= target and n >= min(SMOOTHING_STEPS, len(steps))), None)
