"""Two runs after the same training time, whatever number of steps each has taken by then."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..runs import RunResult, StepRecord
from .summary import averaged_in_curve, curve_of, total_seconds


@dataclass(frozen=True)
class Moment:
    """A hook's run and the baseline's after the time that both have had: the baseline's, unless ours ended sooner."""

    seconds: float
    ours: float  # training loss, on the curve that the report draws
    baselines: float
    held_out: float  # loss, ours - the baseline's; NaN if ours ended sooner
    whole: bool  # True if our run lasted as long as the baseline's, to within one step
    noise: float  # standard error of ours - baselines, from the scatter of the steps' losses about their curves

    @classmethod
    def of(cls, ours: RunResult, baseline: RunResult) -> Moment:
        """Compare two runs of one seed. If the baseline's run went on, only the steps asked for count."""
        all_of_it, had = total_seconds(baseline.asked_steps), total_seconds(ours.steps)
        seconds, whole = min(all_of_it, had), had * (1 + 1 / len(ours.steps)) > all_of_it
        held_out = math.nan
        if whole:  # on a line between two evaluations; NaN before the first of them
            times = np.cumsum([step.seconds for step in ours.steps])[[one.step - 1 for one in ours.evaluations]]
            found = float(np.interp(seconds, times, [one.loss for one in ours.evaluations], left=math.nan))
            # A straight line between two evaluations lies above most curves. That would harm the baseline: of its
            # evaluations only the last counts.
            held_out = found - baseline.evaluation.loss
        return cls(
            seconds=seconds,
            ours=_loss_after(seconds, ours.steps),
            baselines=_loss_after(seconds, baseline.asked_steps),
            held_out=held_out,
            whole=whole,
            noise=math.hypot(_noise_after(seconds, ours.steps), _noise_after(seconds, baseline.asked_steps)),
        )


def _loss_after(seconds: float, steps: Sequence[StepRecord]) -> float:
    """Return the training loss on the curve after this time."""
    times = np.cumsum([step.seconds for step in steps])
    return float(np.interp(seconds, times, curve_of([step.loss for step in steps])))


def _noise_after(seconds: float, steps: Sequence[StepRecord]) -> float:
    """Return the standard error of the point of the curve after this time; infinite if it averages a single loss."""
    losses, averaged = np.array([step.loss for step in steps]), averaged_in_curve(len(steps))
    if averaged[0] == 1:
        return math.inf
    # A point of the curve contains the loss itself, so what is left scatters by a share of 1 - 1/averaged.
    with np.errstate(invalid="ignore"):  # of a run that diverged there is none
        variance = float(np.mean((losses - curve_of(losses.tolist())) ** 2 / (1 - 1 / averaged)))
    times = np.cumsum([step.seconds for step in steps])
    return math.sqrt(variance / float(np.interp(seconds, times, averaged)))
