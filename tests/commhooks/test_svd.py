"""SVD beside NumPy's, and PowerSGD beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from commhooks.compressors import SVD, PowerSGD
from tests import bounds
from tests.commhooks.workers import Workers, largest, mean_of, normal, zeros

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("seed", range(20))
def test_the_mean_is_that_of_every_ranks_best_approximation(seed: int) -> None:
    workers = Workers(SVD(rank=2), 3, zeros((9, 30), (24, 5, 2), (7,), dtype=torch.float64))
    gradients = normal(workers.parameters, 3, seed)
    means = workers.step(gradients)[0]
    for index in range(2):
        best = []
        for own in gradients:
            U, S, Vt = np.linalg.svd(own[index].flatten(1).numpy(), full_matrices=False)
            best.append((U[:, :2] * S[:2]) @ Vt[:2])
        expected = torch.from_numpy(np.mean(best, axis=0)).view_as(means[index])
        bounds.assert_equal_in_float64(means[index], expected)
    bounds.assert_equal_in_float64(means[2], mean_of(gradients, 2))


def test_powersgd_on_one_gradient_comes_to_it() -> None:
    """The part of its basis that is off shrinks by σ₃/σ₂ = 1/2 a step, and its error by the square of that."""
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(size, 8, generator=generator).double())[0] for size in (20, 30))
    gradient = [[(U * 2.0 ** -torch.arange(8)) @ V.t()]]
    best = Workers(SVD(rank=2), 1, zeros((20, 30), dtype=torch.float64)).step(gradient)[0][0]
    workers = Workers(PowerSGD(rank=2), 1, zeros((20, 30), dtype=torch.float64))
    for _ in range(40):
        mean = workers.step(gradient)[0][0]
    bounds.assert_equal_in_float64(mean, best)
    assert largest(best - gradient[0][0]) > 0.01
