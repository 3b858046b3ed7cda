"""Small matrices, which are multiplied side by side: the same numbers as one by one, in far fewer calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.compressors.powersgd import low_rank
from tests import bounds
from tests.commhooks.workers import Workers, normal, relative, zeros
from tests.tiers import covering

pytestmark = pytest.mark.kernels

SETTINGS: dict[str, dict[str, Any]] = {
    "fading residuals": {"rank": 2, "decay": 0.7},
    "rank 1": {"rank": 1},
    "rank 4": {"rank": 4},
    "alternating": {"rank": 2, "alternating": True},
    "cold": {"rank": 2, "warm_start": False},
    "twice": {"rank": 2, "iterations": 2},
    "square": {"rank": 2, "matrices": "most-square"},
}
MIXED = [(20, 30), (30,), (20, 30), (8, 4, 3, 3), (20, 30), (8, 4, 3, 3), (90, 80), (5,), (30, 20), (90, 80)]


STACKS = ["all together", "two at a time", "none"]


@pytest.fixture
def stacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stacks have as many matrices as fit, or two, or be none."""
    if request.param == "two at a time":
        monkeypatch.setattr(low_rank, "STACK_ELEMENTS", 1300)
    if request.param == "none":
        monkeypatch.setattr(low_rank, "SMALL_ELEMENTS", 0)


@pytest.mark.usefixtures("stacks")
@pytest.mark.parametrize(
    ("settings", "stacks", "policy"),
    covering(list(SETTINGS.values()), STACKS, ["fifo", "fused"], fast=8),
    indirect=["stacks"],
    ids=str,
)
def test_each_matrix_gives_what_it_gives_alone(settings: dict[str, Any], policy: str) -> None:
    parameters = _channels_last(zeros(*MIXED, dtype=torch.float64), at=5)
    compressor = commhooks.make_compressor("powersgd", **settings)
    together = Workers(compressor, 2, parameters, policy=policy)
    alone = [Workers(compressor, 2, [p], names=[name]) for p, name in zip(parameters, together.names, strict=True)]
    for step in range(3):
        gradients = normal(parameters, 2, seed=step)
        means = together.step(gradients)
        for number, workers in enumerate(alone):
            for rank, (own,) in enumerate(workers.step([[of_rank[number]] for of_rank in gradients])):
                assert relative(means[rank][number] - own, own) < bounds.IN_FLOAT64
                left = workers.residual(rank, 0)
                assert relative(together.residual(rank, number) - left, left) < bounds.IN_FLOAT64


@pytest.mark.usefixtures("stacks")
@pytest.mark.parametrize("stacks", STACKS, indirect=True)
def test_an_inf_in_one_small_matrix_changes_no_residual_and_no_basis() -> None:
    workers = Workers(commhooks.make_compressor("powersgd", rank=2), 2, zeros(*[(16, 24), (24,)] * 6))
    workers.step(normal(workers.parameters, 2, seed=1))
    before = workers.saved()
    spoilt = normal(workers.parameters, 2, seed=2)
    spoilt[1][4][3, 5] = torch.inf
    for means in workers.step(spoilt):
        assert not any(mean.isfinite().all() for mean in means[::2])
    workers.step_number -= 1
    assert workers.saved() == before


@pytest.mark.parametrize("number", [0, 5])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_mean_that_fp16_cannot_hold_is_found_in_every_stack(
    number: int, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "STACK_ELEMENTS", 2 * 16 * 24)
    workers = Workers(commhooks.make_compressor("powersgd", rank=1), 1, zeros(*[(16, 24)] * 6, dtype=torch.float16))
    (gradients,) = normal(workers.parameters, 1, seed=1)
    gradients[number] = torch.full((16, 24), sign * 60_000.0, dtype=torch.float16)
    assert all(mean.isfinite().all() for mean in workers.step([gradients])[0])
    residual = workers.states[0].of(workers.parameters[number])["residual"]
    residual.fill_(sign * 40_000.0)
    assert not any(mean.isfinite().all() for mean in workers.step([gradients])[0])
    assert (residual == sign * 40_000.0).all()


def _channels_last(parameters: Sequence[Tensor], at: int) -> list[Tensor]:
    return [p.to(memory_format=torch.channels_last) if i == at else p for i, p in enumerate(parameters)]
