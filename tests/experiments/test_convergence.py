"""Error feedback on digits: what loses much of every gradient ends as accurate as dense, and without it does not."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from rich.console import Console

from commhooks.experiments.report.table import plain_table
from commhooks.experiments.results.intervals import Interval
from commhooks.experiments.specs import Spec
from commhooks.language.loss import error_of
from experiments.studies.jobs import run_jobs
from experiments.studies.leaderboard.board import headings, standing_row
from experiments.studies.leaderboard.contenders import DENSE, Contender, contenders
from experiments.studies.leaderboard.running import SIZE, Failed, TrainingJob, load_sized
from experiments.studies.leaderboard.standings import Run, paired, standings
from experiments.studies.lockstep import SCORES, train_in_lockstep
from tests.tiers import THOROUGH

TASK = load_sized("digits", SIZE)
SCORE = SCORES["digits"]
WORKERS = 4
MARGIN = 2.0
"""Points of accuracy below dense."""
MUCH = 0.5
"""A relative error from which on a step may keep back more of a gradient than it sends."""
SLOWER: dict[str, str] = {
    "distro + EF": "the optimiser is given signs, all of one size, at a learning rate meant for gradients",
    "random-block + EF": "an element's turn comes about once in 100 steps, and the run has 160",
    "random-k:ratio=0.01 + EF": "an element's turn comes about once in 100 steps, and the run has 160",
    "random-k:ratio=0.1 + EF": "an element waits ten steps for its turn, and momentum then acts on what is old",
}
"""Contenders with error feedback that end further below dense than the margin, and why."""
NO_WORSE: dict[str, str] = {"distro": "it learns little either way: see above"}
"""Biased contenders that lose much and do as well without error feedback, and why."""


def named(text: str, *, feedback: bool) -> Contender:
    return Contender(Spec.parse(text), feedback)


def relative_error(contender: Contender) -> float:
    """Return the largest relative error ω that the compressor declares for a parameter of the task's model."""
    compressor = contender.make()
    return max(error_of(compressor.loss(*one)) for one in TASK.model.named_parameters())


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


@functools.cache
def long_runs() -> dict[Contender, list[Run]]:
    """Train every contender with ten seeds, and print the table."""
    found, _ = contenders(None, TASK)
    jobs = [TrainingJob("digits", one, seed, TASK.steps, WORKERS) for one in found for seed in range(10)]
    runs: list[Run] = []

    def keep(message: object) -> None:
        assert not isinstance(message, Failed), message
        if isinstance(message, Run):
            runs.append(message)

    run_jobs(jobs, 2, keep)
    by_contender = {one: sorted((r for r in runs if r.contender == one), key=lambda r: r.seed) for one in found}
    table = plain_table("digits, 10 seeds", ("ω", *headings("digits")[1:5]), first="compressor")
    for row in standings([run for own in by_contender.values() for run in own], {}):
        label, *cells = standing_row(row)
        table.add_row(label, f"{relative_error(row.contender):.3g}", *cells[:4])
    Console(width=130).print(table)
    return by_contender


def contractive() -> list[Contender]:
    found, _ = contenders(None, TASK)
    return [one for one in found if one.feedback and relative_error(one) < 1]


def is_unbiased(contender: Contender) -> bool:
    losses = [contender.make().loss(*one) for one in TASK.model.named_parameters()]
    return all(loss.unbiased for loss in losses if loss is not None)


def lossy_and_biased() -> list[Contender]:
    """Return contenders without error feedback that may lose much, and that have a form with it."""
    found, _ = contenders(None, TASK)
    plain = [one for one in found if not one.feedback and Contender(one.spec, feedback=True) in found]
    return [one for one in plain if relative_error(one) >= MUCH and not is_unbiased(one)]


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("one", contractive(), ids=lambda one: one.label)
def test_every_contraction_with_error_feedback_ends_within_the_margin_of_dense(one: Contender) -> None:
    runs = long_runs()
    difference = gain(runs[one], runs[named(DENSE, feedback=False)])
    residuals = [run.trained.residual for run in runs[one]]
    assert (difference.low > -MARGIN) != (one.label in SLOWER), (difference, residuals, SLOWER.get(one.label))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("one", lossy_and_biased(), ids=lambda one: one.label)
def test_without_error_feedback_what_is_biased_and_loses_much_is_measurably_worse(one: Contender) -> None:
    runs = long_runs()
    difference = gain(runs[one], runs[Contender(one.spec, feedback=True)])
    assert (difference.high < 0) != (one.label in NO_WORSE), (difference, NO_WORSE.get(one.label))
