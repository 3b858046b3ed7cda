"""Unbiased PowerSGD: right on average, with the variance that its card says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from commhooks.compressors import UnbiasedPowerSGD
from commhooks.language.randomness import seeded_normal, stable_seed
from tests import bounds
from tests.commhooks.workers import Workers, mean_of, normal, zeros
from tests.processors import digest

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("seed", range(20))
def test_the_mean_is_that_of_the_paper(seed: int) -> None:
    workers = Workers(UnbiasedPowerSGD(rank=3, seed=seed), 2, zeros((9, 30), (7,), dtype=torch.float64))
    gradients = normal(workers.parameters, 2, seed)
    mean, vector = workers.step(gradients)[0]
    drawn = seeded_normal((3, 30), stable_seed("unbiased powersgd", seed, "layer0", 0), mean)
    U = drawn.numpy().T / math.sqrt(3)
    bounds.assert_equal_in_float64(mean, torch.from_numpy(mean_of(gradients, 0).numpy() @ U @ U.T))
    bounds.assert_equal_in_float64(vector, mean_of(gradients, 1))
    assert np.linalg.matrix_rank(mean.numpy()) == 3


@pytest.fixture(scope="module")
def draws() -> tuple[Tensor, Tensor]:
    """Return a matrix, and what came back in its place 4,000 times: 40 parameters of other names for 100 steps."""
    workers = Workers(UnbiasedPowerSGD(rank=2), 1, zeros(*[(4, 12)] * 40, dtype=torch.float64))
    matrix = normal(workers.parameters, 1, seed=5)[0][0]
    means = [torch.stack(workers.step([[matrix] * 40])[0]) for _ in range(100)]
    return matrix, torch.cat(means)


def test_every_element_is_right_on_average(draws: tuple[Tensor, Tensor]) -> None:
    """With a family-wise error of 1e-6.

    The mean of N draws of element j of a row g is a quadratic form A of N·r·m numbers: |A|² = (|g|² + g_j²)/(2·N·r)
    and no eigenvalue above (|g| + |g_j|)/(2·N·r). Of normal numbers, whose tails are heavier than these, it is off by
    more than 2·|A|·√t + 2·(that eigenvalue)·t with probability 2·exp(-t) at most (Laurent and Massart 2000, lemma 1).
    """
    matrix, means = draws
    N, r = len(means), 2
    t = math.log(2 * matrix.numel() / 1e-6)
    row = matrix.norm(dim=1, keepdim=True)
    frobenius = ((row**2 + matrix**2) / (2 * N * r)).sqrt()
    allowed = 2 * frobenius * math.sqrt(t) + (row + matrix.abs()) / (N * r) * t
    assert ((means.mean(0) - matrix).abs() <= allowed).all()
    assert (allowed < row / 4).all(), "a bound that a mean of zero would keep shows nothing"


def test_random_numbers_are_nearly_normal_and_the_same_on_every_processor() -> None:
    """To within six standard errors; the digest is that of any machine."""
    drawn = seeded_normal((500, 200), 1, torch.zeros(1)).double()
    n = drawn.numel()
    assert abs(drawn.mean()) <= 6 / math.sqrt(n)
    assert abs(drawn.square().mean() - 1) <= 6 * math.sqrt(1.85 / n)
    assert abs(drawn.pow(4).mean() - 2.85) <= 6 * math.sqrt(90 / n)  # eighth moments are below the normal one's, 105
    assert drawn.abs().max() < 4.9
    assert digest(seeded_normal((30, 20), 1, torch.zeros(1))) == "01015dff"


def test_the_variance_is_what_the_card_says(draws: tuple[Tensor, Tensor]) -> None:
    """ω = (m + κ - 2)/r for a kurtosis κ of 2.85, to within six standard errors."""
    matrix, means = draws
    errors = (means - matrix).square().sum(dim=(1, 2)) / matrix.square().sum()
    assert abs(errors.mean() - (12 + 0.85) / 2) <= 6 * errors.std() / math.sqrt(len(errors))
