"""The leaderboard's differences from dense, in the form of the package's file, which `estimate` shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from commhooks.experiments.accuracy import Accuracy, Difference, TaskAccuracy
from commhooks.experiments.machine import machine, versions
from experiments.studies.leaderboard.contenders import DENSE
from experiments.studies.leaderboard.standings import Standing
from experiments.studies.lockstep import SCORES

_GUESSED = {"digits": 10.0, "gpt": math.log(256), "lstm": math.log(256)}  # the score of a guess, in the task's unit


def accuracy_of(
    standings: Sequence[Standing],
    descriptions: Mapping[str, str],
    *,
    steps: Mapping[str, int],
    seeds: int,
    workers: int,
    command: str,
) -> Accuracy:
    """Return the differences of all contenders of every task, in the task's unit."""
    here = machine()
    return Accuracy(
        tasks=tuple(
            _task(task, descriptions[task], [row for row in standings if row.task == task], number, seeds)
            for task, number in steps.items()
        ),
        workers=workers,
        command=command,
        machine=f"{here['processor']}, {here['cores']} cores",
        versions=versions(),
    )


def _task(task: str, description: str, rows: Sequence[Standing], steps: int, seeds: int) -> TaskAccuracy:
    score = SCORES[task]
    dense = next(row for row in rows if row.contender.spec.name == DENSE)
    return TaskAccuracy(
        task=task,
        description=description,
        score=score.name,
        unit=score.unit,
        higher_is_better=score.higher_is_better,
        steps=steps,
        seeds=seeds,
        seed_range=score.scale * (dense.highest - dense.lowest),
        fall=abs(score.scale * dense.score - _GUESSED[task]),
        differences=tuple(_difference(row) for row in rows),
    )


def _difference(row: Standing) -> Difference:
    """Return a contender's difference; dense's own is zero."""
    compressor = str(row.contender.make())
    if row.difference is None:
        return Difference(compressor, 0.0, 0.0, 0.0)
    own = row.difference.scaled(SCORES[row.task].scale)
    if row.diverged or not all(map(math.isfinite, (own.mean, own.low, own.high))):
        return Difference(compressor, None, None, None)
    return Difference(compressor, own.mean, own.low, own.high)
