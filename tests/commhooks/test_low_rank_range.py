"""The range of low-rank compressors: up to a stated limit no product overflows, and beyond it an overflow shows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from commhooks import make_compressor
from tests import bounds
from tests.commhooks.workers import Workers, largest, zeros

pytestmark = pytest.mark.kernels

N, M = 48, 64
LARGEST = torch.finfo(torch.float32).max
CERTAIN = {"powersgd": LARGEST / (4 * math.sqrt(M)), "svd": LARGEST / 2}
"""The largest Frobenius norm at which every mean is finite, as the compressors' cards state it."""
FAILS = {"powersgd": LARGEST * math.sqrt(N / M), "svd": LARGEST}
"""From here on a factor of a matrix of ones is an inf: an element of M·q for a q of ones, or the singular value."""


def trained(name: str, rank: int) -> tuple[Workers, Tensor]:
    """Return workers whose basis is that of a matrix of ones, and the matrix, with a norm of 1."""
    workers, ones = Workers(make_compressor(name, rank=rank), 2, zeros((N, M))), torch.full((N, M), (N * M) ** -0.5)
    for _ in range(3):
        workers.step([[ones], [ones]])
    return workers, ones


def state_of(workers: Workers) -> list[Tensor]:
    return [t.clone() for table in workers.states for t in table.of(workers.parameters[0]).tensors.values()]


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("name", CERTAIN)
def test_just_below_the_stated_limit_the_mean_is_right(name: str, rank: int) -> None:
    workers, ones = trained(name, rank)
    scale = 0.99 * CERTAIN[name]
    means = workers.step([[ones * scale], [ones * scale]])
    bound = bounds.of_conservation([ones, ones], rank) + bounds.of_orthonormal_rows(rank, N, torch.float32)
    assert largest(means[0][0].double() / scale - ones.double()) <= bound
    assert torch.equal(means[0][0], means[1][0])
    assert all(tensor.isfinite().all() for tensor in state_of(workers))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("name", FAILS)
def test_just_above_the_range_every_mean_is_non_finite_and_no_state_changes(name: str, rank: int) -> None:
    workers, ones = trained(name, rank)
    before = state_of(workers)
    scale = 1.01 * FAILS[name]
    gradient = (ones.double() * scale).float()
    assert gradient.isfinite().all()
    for means in workers.step([[gradient], [gradient]]):
        assert not means[0].isfinite().all()
    assert all(torch.equal(was, now) for was, now in zip(before, state_of(workers), strict=True))
    (mean,), _ = workers.step([[ones], [ones]])
    assert mean.isfinite().all()
