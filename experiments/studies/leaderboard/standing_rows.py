"""The leaderboard's tables as text, the same for a terminal, a page and the documentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from commhooks.experiments.report.words import NEVER, percent, times
from commhooks.experiments.results.intervals import Interval
from commhooks.units import bytes_in_words
from experiments.studies.leaderboard.grace import Comparison
from experiments.studies.leaderboard.standings import Standing
from experiments.studies.lockstep import SCORES

GRACE_HEADINGS = ("method", "GRACE: without → with", "ours", "ours: points gained", "sign")


def headings(task: str) -> tuple[str, ...]:
    """Return the column headings of a task's table."""
    score = SCORES[task]
    return (
        "compressor",
        f"{score.name} (range)",
        f"against dense, {score.unit}",
        "residual / gradient",
        "payload a step",
        "vNMSE",
        "smaller than dense",
        "moved a step",
        "compute, copies",
    )


def standing_row(row: Standing) -> list[str]:
    """Return a contender's cells."""
    score, compute = SCORES[row.task], row.compute
    return [
        row.contender.label,
        score_in_words(row),
        NEVER if row.difference is None else interval_in_words(row.difference.scaled(score.scale)),
        NEVER if row.residual is None else f"{row.residual:.3g}",
        bytes_in_words(row.payload_bytes),
        f"{row.vnmse:.2g}",
        times(row.ratio),
        bytes_in_words(row.moved_bytes),
        NEVER if compute is None else f"{compute.median:.1f} ({compute.low:.1f} – {compute.high:.1f})",
    ]


def score_in_words(row: Standing) -> str:
    """Return the mean score and the range over the seeds, and the number of seeds that diverged."""
    form: Callable[[float], str] = percent if SCORES[row.task].scale == 100 else "{:.3f}".format
    mean, low, high = map(form, (row.score, row.lowest, row.highest))
    diverged = f", {row.diverged} diverged" if row.diverged else ""
    return f"{mean} ({low} – {high}{diverged})"


def interval_in_words(interval: Interval) -> str:
    """Return the mean difference and its interval."""
    if not math.isfinite(interval.mean):
        return "diverged"
    mean, low, high = (round(value, 2) + 0.0 for value in (interval.mean, interval.low, interval.high))  # no -0.00
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"


def front_in_words(rows: Sequence[Standing], *, code: bool = False) -> str:
    """Return the names of the contenders on the Pareto front, from few bytes to many."""
    front = sorted((row for row in rows if row.on_front), key=lambda row: row.payload_bytes)
    return ", ".join(f"`{row.contender.label}`" if code else row.contender.label for row in front)


def grace_row(one: Comparison) -> list[str]:
    """Return a published method's cells."""
    published = one.published
    return [
        published.method,
        f"{published.without:.1f} → {published.with_feedback:.1f}",
        published.ours,
        NEVER if one.ours is None else interval_in_words(one.ours),
        one.verdict,
    ]
