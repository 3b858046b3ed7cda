"""Reproductions about accuracy: what they train, and what their tables and sentences say of given numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from commhooks.experiments.tasks import load_task
from experiments.studies.blocks import Block, Table
from experiments.studies.lockstep import own_gradients
from experiments.studies.reproduce import load_reproduction
from experiments.studies.reproduce.ddp.figure_11 import Settings as Skipped
from experiments.studies.reproduce.ddp.figure_11 import Training
from experiments.studies.reproduce.powersgd.global_residual import Settings as Residuals

NOISE = (-0.01, 0.0, 0.01)  # by seed


def shown(name: str, settings: Any, measured: Mapping[str, Any]) -> tuple[list[Sequence[Sequence[str]]], str]:
    """Return the rows of each table, and the paragraphs."""
    blocks: list[Block] = load_reproduction(name).show(settings, measured)
    return [block.rows for block in blocks if isinstance(block, Table)], " ".join(
        block for block in blocks if isinstance(block, str)
    )


def test_gradients_add_up_until_they_are_synchronized() -> None:
    workers, rate = 3, 0.1
    one, plain = load_task("digits:size=tiny", 1), load_task("digits:size=tiny", 1)
    training = Training(one, rate, every=2)
    sums = dict.fromkeys(dict(plain.model.named_parameters()), torch.zeros(()))
    for iteration in range(2):
        assert all(torch.equal(p, q) for p, q in zip(one.model.parameters(), plain.model.parameters(), strict=True))
        training.iterate([one.batch(iteration, worker, workers) for worker in range(workers)])
        for own in own_gradients(plain, iteration, workers)[1]:
            sums = {name: total + own[name] / workers for name, total in sums.items()}
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(dict(one.model.named_parameters())[name], parameter - rate * sums[name])


def skipped(losses: Mapping[int, float], diverged: int | None = None) -> tuple[list[Sequence[Sequence[str]]], str]:
    """Return what is shown of losses by interval; seed 1 has none with the interval `diverged`."""
    settings = Skipped(batches=((8, 0.02),), every=tuple(losses), iterations=40, points=2, seeds=3)
    runs: list[dict[str, Any]] = [
        {
            "batch": 8,
            "rate": 0.02,
            "seed": seed,
            "every": every,
            "curve": [2.0, loss],
            "loss": math.nan if (every, seed) == (diverged, 1) else loss + seed,
            "accuracy": 0.5,
        }
        for every, loss in losses.items()
        for seed in range(3)
    ]
    for run, noise in zip(runs[:3], NOISE, strict=True):  # of the reference
        run["loss"] += noise
    return shown("ddp-figure-11", settings, {"runs": runs})


def test_skipping_is_compared_seed_by_seed_with_synchronizing_always() -> None:
    (rows,), text = skipped({1: 1.0, 4: 1.0, 8: 1.5})
    assert [row[0] for row in rows] == ["iteration", "4 iterations", "8 iterations"]
    assert [row[1] for row in rows] == ["40", "10", "5"]
    assert rows[2][4] == "+0.500 (+0.475 to +0.525)"
    assert "every 4 iterations, no difference seen (-0.025 to +0.025, 3 seeds)" in text
    assert "every 8 iterations, 0.500 higher (+0.475 to +0.525, 3 seeds)" in text


def test_one_run_that_diverged_is_said_and_its_interval_not_compared() -> None:
    (rows,), text = skipped({1: 1.0, 4: 1.5, 8: 1.0}, diverged=8)
    assert rows[2][2:] == ["1 of 3 runs diverged", "—", "—", "—", "—"]
    assert "every 8 iterations, 1 of 3 runs diverged" in text
    assert "every 4 iterations, 0.500 higher" in text
    (rows,), text = skipped({1: 1.0, 4: 1.5}, diverged=1)
    assert rows[1][4] == rows[1][6] == "—"
    assert "1 of 3 runs that synchronize in every iteration diverged, so nothing is compared" in text


def residual_run(label: str, seed: int, norm: float, accuracy: float) -> dict[str, Any]:
    looks = {"steps": [20, 40], "residuals": [norm, norm], "common": [0.5, 0.5], "norms": [1.0, norm]}
    return {"label": label, "skew": 1.0, "seed": seed, "elements": 1234, "accuracy": accuracy, "loss": 1.0} | looks


@pytest.mark.parametrize(
    ("gain", "said"),
    [(0.0, "no difference seen in accuracy (-2.48 to +2.48 points)"), (0.2, "ours is 20.00 points more accurate")],
)
def test_residuals_are_compared_as_ratios_and_accuracies_as_differences(gain: float, said: str) -> None:
    settings = Residuals(skews=(1.0,), seeds=3)
    runs = [residual_run("PyTorch's", seed, 80.0 + seed, 0.5) for seed in range(3)]
    runs += [residual_run("ours", seed, (80.0 + seed) / 40, 0.5 + gain + noise) for seed, noise in enumerate(NOISE)]
    (rows,), text = shown("powersgd-global-residual", settings, {"runs": runs})
    assert [row[0] for row in rows] == ["skewed, PyTorch's", "skewed, ours"]
    assert rows[0][1] == rows[1][1] == "1,234"
    assert "PyTorch's residual ends 40 times as large as ours (40 to 40, 3 seeds)" in text
    assert said in text
    runs[0] |= {"loss": math.nan, "accuracy": 0.1}  # what it still guesses right
    (rows,), text = shown("powersgd-global-residual", settings, {"runs": runs})
    assert rows[1][-1] == "—" and "1 run diverged, so the two hooks are not compared" in text
