"""The effect of error feedback here, compared with its effect in GRACE's published runs.

Source: Xu et al., "GRACE: A Compressed Communication Framework for Distributed Machine Learning", ICDCS 2021, and the
results published in its repository (sands-lab/grace): ResNet-20 on CIFAR-10, 8 workers, one run for each figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commhooks.experiments.results.intervals import Interval
from experiments.studies.leaderboard.contenders import LeftOut
from experiments.studies.leaderboard.standings import Run, paired
from experiments.studies.lockstep import SCORES

TASK = "digits"
"""The task on which our compressors are measured."""


@dataclass(frozen=True)
class Published:
    """One of GRACE's methods: top-1 accuracy in % without and with error feedback, and our most similar compressor."""

    method: str
    ours: str
    without: float
    with_feedback: float

    @property
    def effect(self) -> float:
        """The number of points that error feedback gained."""
        return self.with_feedback - self.without


PUBLISHED = (
    Published("top-k 1 %", "top-k:ratio=0.01", 84.8, 91.0),
    Published("top-k 10 %", "top-k:ratio=0.1", 89.3, 90.9),
    Published("random-k 1 %", "random-k:ratio=0.01", 55.4, 88.3),
    Published("random-k 10 %", "random-k:ratio=0.1", 82.5, 89.1),
    Published("QSGD, first setting", "qsgd", 91.0, 91.1),
    Published("QSGD, second setting", "qsgd", 90.7, 91.1),
    Published("QSGD, third setting", "qsgd", 90.6, 29.3),
    Published("TernGrad", "terngrad", 90.6, 91.4),
    Published("natural", "natural", 91.1, 91.0),
    Published("8-bit", "int8", 91.1, 91.3),
    Published("signum", "signum", 84.8, 10.4),
)
"""Methods published with both figures, for which the registry has a compressor.

GRACE's unscaled sign is missing: `sign` here scales each block, which error feedback requires."""


@dataclass(frozen=True)
class Comparison:
    """A published effect of error feedback, and ours."""

    published: Published
    ours: Interval | None  # points; None: there is no pair of runs
    verdict: str


def compare_with_grace(runs: Sequence[Run], left_out: Sequence[LeftOut]) -> list[Comparison]:
    """Return GRACE's effect and ours for every published method that took part or was left out."""
    reasons = {one.label: one.reason for one in left_out}
    found = []
    for published in PUBLISHED:
        own = [run for run in runs if run.task == TASK and run.contender.spec.label == published.ours]
        fed = [run for run in own if run.contender.feedback]
        plain = [run for run in own if not run.contender.feedback]
        if fed and plain:
            score = SCORES[TASK]
            ours = paired(fed, plain, score).scaled(score.scale)
            found.append(Comparison(published, ours, _verdict(published.effect, ours)))
        elif f"{published.ours} + EF" in reasons:
            found.append(Comparison(published, None, "error feedback is refused here"))
    return found


def _verdict(effect: float, ours: Interval) -> str:
    if ours.sign == 0:
        return "within noise"
    return "agree" if (effect > 0) == (ours.sign > 0) else "disagree"
