"""The leaderboard's standings: means, paired differences from dense with confidence intervals, and the front."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from commhooks.experiments.results.intervals import Interval, differences
from commhooks.experiments.results.summary import Spread
from experiments.studies.leaderboard.contenders import DENSE, Contender
from experiments.studies.lockstep import SCORES, Score, Trained


@dataclass(frozen=True)
class Run:
    """One run of the leaderboard."""

    task: str
    contender: Contender
    seed: int
    trained: Trained


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One contender on one task, over all seeds."""

    task: str
    contender: Contender
    score: float  # mean over seeds
    lowest: float
    highest: float
    difference: Interval | None  # from dense, seed by seed; None for dense itself
    payload_bytes: float  # per step and worker
    vnmse: float  # of the first step, mean over seeds
    moved_bytes: float
    ratio: float  # dense payload over this one's
    residual: float | None  # norm at the end over the gradient's, mean over seeds
    diverged: int  # seeds whose loss stopped being finite
    compute: Spread | None  # relative to a copy of the gradient; None: not measured
    on_front: bool = False


def paired(runs: Sequence[Run], others: Sequence[Run], score: Score) -> Interval:
    """Return the first runs' score minus the others' with the same seed: the mean and its interval."""
    ours, theirs = ({run.seed: score.of(run.trained) for run in each} for each in (runs, others))
    return Interval.of(list(differences(ours, theirs).values()))


def standings(runs: Sequence[Run], computes: dict[Contender, Spread]) -> list[Standing]:
    """Return the standing of every contender of every task, in order of appearance; the Pareto front is marked."""
    found = []
    for task in dict.fromkeys(run.task for run in runs):
        grouped: dict[Contender, list[Run]] = {}
        for run in runs:
            if run.task == task:
                grouped.setdefault(run.contender, []).append(run)
        dense = next(own for contender, own in grouped.items() if contender.spec.name == DENSE)
        found += _with_front([_standing(own, dense, computes.get(contender)) for contender, own in grouped.items()])
    return found


def recommended(rows: Sequence[Standing]) -> list[Contender]:
    """Return the contenders to try first, from few bytes to many.

    On every task even the worse end of their interval is no worse than dense with another seed, and no other such
    contender sends fewer bytes for as little compute. Bytes are those of the task on which a contender saves least.
    """
    by_contender: dict[Contender, list[Standing]] = {}
    for row in rows:
        by_contender.setdefault(row.contender, []).append(row)
    dense = {row.task: row for row in rows if row.contender.spec.name == DENSE}
    costs = {
        contender: (-min(row.ratio for row in own), own[0].compute.median)
        for contender, own in by_contender.items()
        if own[0].compute is not None and own[0].ratio > 1 and all(_is_safe(row, dense[row.task]) for row in own)
    }
    front = [
        contender
        for contender, cost in costs.items()
        if not any(other != cost and other[0] <= cost[0] and other[1] <= cost[1] for other in costs.values())
    ]
    return sorted(front, key=costs.__getitem__)


def _is_safe(row: Standing, dense: Standing) -> bool:
    if row.difference is None or not math.isfinite(row.difference.mean):
        return False
    worst = -row.difference.low if SCORES[row.task].higher_is_better else row.difference.high
    return worst <= dense.highest - dense.lowest


def is_better(one: float, other: float, score: Score) -> bool:
    """Return whether one score is better than the other; a number is better than NaN."""
    if math.isnan(other):
        return not math.isnan(one)
    return one > other if score.higher_is_better else one < other


def _standing(runs: Sequence[Run], dense: Sequence[Run], compute: Spread | None) -> Standing:
    score, trained = SCORES[runs[0].task], [run.trained for run in runs]
    scores = [score.of(one) for one in trained]
    residuals = [one.residual for one in trained if one.residual is not None]
    payload = statistics.fmean(one.payload_bytes for one in trained)
    return Standing(
        task=runs[0].task,
        contender=runs[0].contender,
        score=statistics.fmean(scores),
        lowest=min(scores),
        highest=max(scores),
        difference=None if runs[0].contender == dense[0].contender else paired(runs, dense, score),
        payload_bytes=payload,
        vnmse=statistics.fmean(one.vnmse for one in trained),
        moved_bytes=statistics.fmean(one.moved_bytes for one in trained),
        ratio=statistics.fmean(run.trained.payload_bytes for run in dense) / payload if payload else math.inf,
        residual=statistics.fmean(residuals) if residuals else None,
        diverged=sum(one.diverged is not None for one in trained),
        compute=compute,
    )


def _with_front(rows: Sequence[Standing]) -> list[Standing]:
    """Mark contenders that no other beats: with a better score at no more bytes, or no worse score at fewer."""
    score, best, front = SCORES[rows[0].task], math.nan, set[int]()
    # From few bytes to many, the better first among equals: each one that improves on all before it.
    sign = -1 if score.higher_is_better else 1
    badness = [math.inf if math.isnan(row.score) else sign * row.score for row in rows]
    by_bytes = sorted(range(len(rows)), key=lambda n: (rows[n].payload_bytes, badness[n]))
    for number in by_bytes:
        if is_better(rows[number].score, best, score):
            best = rows[number].score
            front.add(number)
    return [dataclasses.replace(row, on_front=number in front) for number, row in enumerate(rows)]
