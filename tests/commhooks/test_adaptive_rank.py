"""Adaptive rank: what it chooses, when, and that the choice is state like any other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from commhooks import Compressor, ErrorFeedback, PerParameter, StartAfter
from commhooks.compressors import AdaptiveRank, PowerSGD
from commhooks.compressors.powersgd.adaptive_rank import _norms_of_rows
from commhooks.compressors.powersgd.allocation import Layer, fewest_bytes, least_error
from tests.commhooks.workers import Workers, mean_of, normal, zeros

SHAPES = ((24, 40), (40,), (30, 36), (48, 20))


def choices(workers: Workers, rank: int = 0) -> list[int]:
    return [workers.states[rank].of(parameter).choice for parameter in workers.parameters]


# --- the knapsack -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all_that_there_are(seed: int) -> None:
    """Of 4 layers with up to 4 columns each; prices are whole, so nothing is rounded."""
    random = np.random.default_rng(seed)
    offers = [random.random(int(random.integers(2, 5))).tolist() for _ in range(4)]
    layers = [Layer(gains, cost=int(random.integers(1, 9)), least=1, uniform=2) for gains in offers]
    uniform = [layer.uniform for layer in layers]
    budget = cost_of(layers, uniform)
    every = list(itertools.product(*(range(1, len(layer.gains) + 1) for layer in layers)))

    chosen = least_error(layers, budget)
    assert cost_of(layers, chosen) <= budget
    assert gain_of(layers, chosen) == pytest.approx(
        max(gain_of(layers, one) for one in every if cost_of(layers, one) <= budget), rel=1e-12
    )
    chosen, wanted = fewest_bytes(layers), gain_of(layers, uniform) * (1 - 1e-12)
    assert gain_of(layers, chosen) >= wanted
    assert cost_of(layers, chosen) == min(cost_of(layers, one) for one in every if gain_of(layers, one) >= wanted)


def test_a_budget_that_is_too_small_buys_the_least() -> None:
    assert least_error([Layer([1.0, 1.0, 1.0], 5, 2, 2), Layer([1.0, 1.0], 7, 1, 2)], 16) == [2, 1]


def cost_of(layers: Sequence[Layer], chosen: Sequence[int]) -> int:
    return sum(layer.cost * columns for layer, columns in zip(layers, chosen, strict=True))


def gain_of(layers: Sequence[Layer], chosen: Sequence[int]) -> float:
    return sum(sum(layer.gains[:columns]) for layer, columns in zip(layers, chosen, strict=True))


# --- what it chooses by -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms_are_right_and_do_not_depend_on_the_order_of_a_sum(scale: float) -> None:
    """Elements and the norm are rounded to 2⁻¹⁵ of their row's largest, or 2⁻¹⁶ off: so is the norm, times √m + 1."""
    Q = torch.randn(5, 200, generator=torch.Generator().manual_seed(0)) * scale
    Q[3] = 0
    norms = _norms_of_rows(Q.unsqueeze(0))
    largest = Q.abs().amax(dim=1).double()
    assert ((norms - Q.double().norm(dim=1)).abs() <= largest * 2**-16 * (200**0.5 + 1) + norms * 2**-22).all()
    for seed in range(20):
        order = torch.randperm(200, generator=torch.Generator().manual_seed(seed))
        of_two = Q[:, order].unflatten(1, (2, 100)).transpose(0, 1)
        assert torch.equal(_norms_of_rows(of_two), norms)


def test_norms_do_not_depend_on_the_last_bit_of_a_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for AVX2 and SSE4 of one processor differ in one of a hundred."""
    Q = torch.randn(1, 500, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    root, norms = torch.Tensor.sqrt, _norms_of_rows(Q)
    for end in (0.0, math.inf):
        monkeypatch.setattr(
            torch.Tensor, "sqrt", lambda x, end=end: torch.nextafter(root(x), torch.tensor(end).to(x.dtype))
        )
        assert torch.equal(_norms_of_rows(Q), norms)


def test_the_norms_of_many_experts_rows_do_not_overflow() -> None:
    Q = torch.ones(1 << 12, 1, 1 << 10)
    assert torch.equal(_norms_of_rows(Q), torch.tensor([2048.0]))


def flat_and_steep(seed: int, world_size: int = 2) -> list[list[Tensor]]:
    """Return gradients of three layers of rank one, and of one whose spectrum is flat."""
    generator = torch.Generator().manual_seed(seed)
    spectra = [torch.eye(24)[0].double()] * 3 + [torch.ones(24).double()]
    mean = []
    for spectrum in spectra:
        U, V = (torch.linalg.qr(torch.randn(size, 24, generator=generator).double())[0] for size in (24, 40))
        mean.append((U * spectrum) @ V.t())
    return [mean] * world_size


def run(compressor: Compressor, gradients: list[list[Tensor]]) -> tuple[int, float, Workers]:
    """Return the bytes and the squared error of the last 20 of 40 steps."""
    workers = Workers(compressor, 2, [torch.zeros_like(own) for own in gradients[0]], policy="fused")
    for _ in range(20):
        workers.step(gradients)
    error, before = 0.0, workers.traffic.payload_bytes
    for _ in range(20):
        means = workers.step(gradients)[0]
        error += sum(float((mean - mean_of(gradients, i)).square().sum()) for i, mean in enumerate(means))
    return workers.traffic.payload_bytes - before, error, workers


def test_a_flat_spectrum_gets_the_columns_that_steep_ones_do_not_need() -> None:
    """For a whole window it spends no more than the uniform rank, and leaves less; or leaves no more, and spends less.

    Measured after one window, over the next; without error feedback, so that a step's error is what it leaves.
    """
    gradients = flat_and_steep(seed=0)
    uniform_bytes, uniform_error, _ = run(PowerSGD(rank=3), gradients)
    settings: dict[str, Any] = {"rank": 3, "min_rank": 1, "max_rank": 6, "every": 20}

    spent, error, workers = run(AdaptiveRank(**settings), gradients)
    assert choices(workers) == choices(workers, rank=1) and choices(workers)[3] == 6
    assert spent <= uniform_bytes and error < 0.9 * uniform_error
    spent, error, workers = run(AdaptiveRank(rule="fewest-bytes", **settings), gradients)
    assert choices(workers) == [1, 1, 1, 3]
    assert uniform_bytes >= 1.5 * spent and error <= 1.001 * uniform_error


def test_accordion_gives_the_high_rank_to_layers_whose_norm_changes() -> None:
    compressor = ErrorFeedback(inner=AdaptiveRank(rule="accordion", every=4, eta=0.5))
    workers = Workers(compressor, 2, zeros((40, 60), (40, 60)))
    for step in range(9):
        gradients = normal(workers.parameters, 2, seed=0)
        for own in gradients:
            own[1] *= 0.4 if step >= 4 else 1.0
        workers.step(gradients)
        assert choices(workers) == ([0, 0] if step < 1 else [8, 8] if step < 5 else [4, 8])
    workers.step(gradients)
    assert choices(workers) == [4, 4]


# --- the choice is state ----------------------------------------------------------------------------------------------


def test_a_step_that_measured_and_did_not_count_changes_no_choice() -> None:
    compressor = ErrorFeedback(inner=AdaptiveRank(rank=3, max_rank=5, every=5))
    workers = Workers(compressor, 2, zeros(*SHAPES), policy="fused", atomic=True)
    for step in range(6):
        workers.step(normal(workers.parameters, 2, seed=step))
    before = choices(workers)
    spoiled = normal(workers.parameters, 2, seed=6)
    spoiled[1][2][3, 4] = float("nan")
    workers.step(spoiled)
    workers.step(normal(workers.parameters, 2, seed=7))
    assert choices(workers) == before and any(before)


@pytest.mark.parametrize("wrap", ["rules", "start after"])
def test_it_chooses_inside_of_other_compressors(wrap: str) -> None:
    inner = ErrorFeedback(inner=AdaptiveRank(rank=3, max_rank=5, every=5))
    outer = PerParameter(rules=(("layer[02]", inner),)) if wrap == "rules" else StartAfter(inner=inner, steps=2)
    workers = Workers(outer, 2, zeros(*SHAPES), policy="fused")
    for step in range(10):
        workers.step(normal(workers.parameters, 2, seed=step))
    chosen = [bool(choice) for choice in choices(workers)]
    assert chosen == ([True, False, True, False] if wrap == "rules" else [True, False, True, True])
