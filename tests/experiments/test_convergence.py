"""Error feedback on digits: what loses much of every gradient ends as accurate as dense, and without it does not."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from commhooks.experiments.results.intervals import Interval
from commhooks.experiments.specs import Spec
from experiments.studies.leaderboard.contenders import DENSE, Contender
from experiments.studies.leaderboard.running import SIZE, load_sized
from experiments.studies.leaderboard.standings import Run, paired
from experiments.studies.lockstep import SCORES, train_in_lockstep
from tests.tiers import THOROUGH

TASK = load_sized("digits", SIZE)
SCORE = SCORES["digits"]
WORKERS = 4
MARGIN = 2.0
"""Points of accuracy below dense."""


def named(text: str, *, feedback: bool) -> Contender:
    return Contender(Spec.parse(text), feedback)


def gain(runs: Sequence[Run], others: Sequence[Run]) -> Interval:
    """Return how many points the first are better, seed by seed."""
    return paired(runs, others, SCORE).scaled(SCORE.scale)


@functools.cache
def short_runs(text: str, feedback: bool = False) -> list[Run]:
    """Train with three seeds for a hundred steps: enough for effects of many points."""
    one = named(text, feedback=feedback)
    tasks = [load_sized("digits", SIZE, seed) for seed in range(3)]
    return [
        Run("digits", one, task.seed, train_in_lockstep(task, one.make(task.seed), steps=100, workers=WORKERS))
        for task in tasks
    ]


@THOROUGH  # what is sent and what is owed add up, for every compressor: commhooks.testing
@pytest.mark.parametrize("text", ["powersgd:rank=2", pytest.param("top-k:ratio=0.05", marks=pytest.mark.soak)])
def test_with_error_feedback_a_few_percent_of_the_bytes_lose_less_than_the_margin(text: str) -> None:
    fed, dense = short_runs(text, True), short_runs(DENSE)
    assert gain(fed, dense).low > -MARGIN
    assert all(run.trained.payload_bytes < 0.15 * run.trained.gradient_bytes for run in fed)


@THOROUGH
def test_without_error_feedback_low_rank_is_measurably_worse() -> None:
    assert gain(short_runs("powersgd:rank=2"), short_runs("powersgd:rank=2", True)).high < -MARGIN
