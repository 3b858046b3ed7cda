"""Figures of a profile, computed from the steps that every rank measured.

A step takes as long as on the slowest rank, so all figures of a step are taken from that rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from commhooks.errors import SettingsError
from commhooks.experiments.planning.phases import Phases
from commhooks.experiments.planning.profiles import BucketProfile, RoundProfile, Seconds, StepParts
from commhooks.experiments.planning.segments import BucketRecord


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step on one rank."""

    phases: Phases
    buckets: list[BucketRecord]
    own_seconds: float
    """The profiler's, on both threads."""

    def brief(self, parameters: int) -> Brief:
        """Return the part that other ranks need, for a model with this number of parameters."""
        begin = self.phases.begin
        ready = np.full(parameters, np.nan)
        for moment, number in self.phases.gradients:
            ready[number] = moment - begin
        buckets = [dataclasses.replace(one, submitted=one.submitted - begin) for one in self.buckets]
        return Brief(self.phases.seconds, self.phases.parts, self.own_seconds, ready, buckets)


@dataclasses.dataclass(frozen=True)
class Brief:
    """One step on one rank, in short; moments are seconds from its beginning."""

    seconds: float
    parts: tuple[float, float, float, float]
    own_seconds: float
    ready: np.ndarray
    """The time at which each parameter's gradient was ready, in seconds; NaN: it had none."""
    buckets: list[BucketRecord]


def longest(of_ranks: Sequence[Sequence[Brief]]) -> list[Brief]:
    """Return each step as it was on the rank on which it took longest."""
    return [max(step, key=lambda brief: brief.seconds) for step in zip(*of_ranks, strict=True)]


def parts_of(steps: Sequence[Brief]) -> StepParts:
    """Return where the time of a median step goes: in the proportions of the steps between the quartiles."""
    lengths = [step.seconds for step in steps]
    low, median, high = (float(value) for value in np.percentile(lengths, (25, 50, 75)))
    middle = [step for step in steps if low <= step.seconds <= high] or [
        sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
    ]
    factor = median / sum(step.seconds for step in middle)
    forward, backward, exposed, optimizer = (
        factor * sum(part) for part in zip(*(s.parts for s in middle), strict=True)
    )
    return StepParts(Seconds(median, low, high), forward, backward, exposed, optimizer, len(steps))


def buckets_of(hook: str, steps: Sequence[Brief]) -> tuple[BucketProfile, ...]:
    """Return the buckets of a hook's steps: medians, and what the last step sent.

    Raises:
        SettingsError: Steps have different buckets or rounds, so there is no median of them.

    """
    shapes = {tuple((bucket.parameters, len(bucket.seconds)) for bucket in step.buckets) for step in steps}
    if len(shapes) > 1:
        raise SettingsError(
            f"profile: hook {hook!r} has other buckets, or takes more rounds, in some steps than in others; profile "
            "each of its phases alone, such as the compressor inside StartAfter."
        )
    return tuple(_bucket(same) for same in zip(*(step.buckets for step in steps), strict=True))


def ready_of(steps: Sequence[Brief]) -> np.ndarray:
    """Return when each parameter's gradient is ready, median over the steps; NaN: it never is."""
    return np.asarray(np.median([step.ready for step in steps], axis=0))


def _bucket(same: Sequence[BucketRecord]) -> BucketProfile:
    seconds = np.median([bucket.seconds for bucket in same], axis=0).tolist()
    rounds = tuple(RoundProfile(one, sends) for one, sends in zip(seconds, same[-1].sends, strict=True))
    ready, after = (float(np.median(values)) for values in zip(*((b.submitted, b.after) for b in same), strict=True))
    return BucketProfile(same[-1].parameters, same[-1].bytes, ready, rounds, after)
