"""Runs that are trained on two ranks, in one world."""

from __future__ import annotations

from collections.abc import Sequence

from commhooks.experiments.launch import run_world
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.training.worker import RunDone, Work, train_all

PATIENCE = 200.0
"""Seconds without a word, for what takes 10 when the machine has nothing else to do."""


def train_on_two_ranks(runs: Sequence[RunSettings]) -> list[RunResult]:
    """Return the results of runs, in their order."""
    found: dict[int, RunResult] = {}

    def hear(message: object) -> None:
        if isinstance(message, RunDone):
            found[message.run] = message.result

    run_world(train_all, 2, Work(dict(enumerate(runs)), {}, {}), hear, timeout=PATIENCE)
    return [found[number] for number in range(len(runs))]
