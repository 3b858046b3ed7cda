"""SVD beside NumPy's, and PowerSGD beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from commhooks.compressors import SVD
from tests import bounds
from tests.commhooks.workers import Workers, mean_of, normal, zeros

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
