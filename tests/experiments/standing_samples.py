"""A leaderboard that never ran: contenders with round numbers, for tests of what is made of runs."""

from __future__ import annotations

import math

from commhooks.experiments.results.summary import Spread
from commhooks.experiments.specs import Spec
from experiments.studies.leaderboard.contenders import Contender
from experiments.studies.leaderboard.standings import Run, Standing, standings
from experiments.studies.lockstep import Trained

DENSE_BYTES = 100_000.0
FORMS = (
    ("all-reduce", False, 0.97, 1.0),
    ("fp16", False, 0.97, 2.0),
    ("int4", True, 0.96, 7.0),
    ("sign", True, 0.965, 25.0),
    ("sign", False, 0.90, 25.0),
    ("powersgd:rank=4", True, 0.95, 12.0),
    ("powersgd:rank=1", True, 0.955, 40.0),
    ("top-k:ratio=0.01", True, 0.94, 50.0),
    ("top-k:ratio=0.01", False, 0.80, 50.0),
    ("terngrad", True, math.nan, 14.0),
)
"""Compressor, error feedback, accuracy at seed 0, and how many times smaller than dense."""


def trained(accuracy: float, ratio: float, seed: int = 0, *, feedback: bool = False) -> Trained:
    noise = (0.0, 0.002, -0.001)[seed % 3]
    return Trained(
        loss=3 * (1.2 - accuracy),
        accuracy=accuracy + noise,
        payload_bytes=DENSE_BYTES / ratio,
        moved_bytes=1.5 * DENSE_BYTES / ratio,
        gradient_bytes=DENSE_BYTES,
        residual=2.5 if feedback else None,
        diverged=7 if math.isnan(accuracy) else None,
        vnmse=0.01 * (ratio - 1),
    )


def runs(seeds: int = 3) -> list[Run]:
    return [
        Run(task, Contender(Spec.parse(name), feedback), seed, trained(accuracy, ratio, seed, feedback=feedback))
        for task in ("digits", "gpt")
        for name, feedback, accuracy, ratio in FORMS
        for seed in range(seeds)
    ]


def computes() -> dict[Contender, Spread]:
    found = {run.contender for run in runs(1)}
    return {one: Spread(3.0 + n, 2.5 + n, 4.0 + n) for n, one in enumerate(sorted(found, key=lambda one: one.label))}


def rows() -> list[Standing]:
    return standings(runs(), computes())
