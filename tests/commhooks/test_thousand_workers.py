"""A thousand workers in one process, with one compressor of each kind."""

from __future__ import annotations

import pytest
import torch

from tests.cases import BY_NAME
from tests.commhooks.workers import Workers, mean_of, normal, zeros
from tests.tiers import rows, thorough

WORLD_SIZE = 1_000
KINDS = [
    "all-reduce", "fp16", "powersgd-2", "adaptive-rank", "random-k", "top-k", "sparse-loco", "signum",
]  # fmt: skip
"""Sums, casts, factors, factors that are chosen, drawn places, places that travel, votes; each run has codes."""
SUMS = ["all-reduce", "powersgd-2"]
LONG = [pytest.param(name, marks=pytest.mark.soak) for name in KINDS if name not in SUMS]


@pytest.mark.parametrize("name", [*rows(["two-hop-int8"]), *thorough(SUMS), *LONG])
def test_a_thousand_workers_end_with_the_same_mean(name: str) -> None:
    workers = Workers(BY_NAME[name].make(), WORLD_SIZE, zeros((24, 40), (40,)))
    gradients = normal(workers.parameters, WORLD_SIZE, seed=0)
    means = workers.step(gradients)
    for own in means[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(own, means[0], strict=True))
    assert all(torch.isfinite(mean).all() for mean in means[0])
    if BY_NAME[name].lossless:
        for index, mean in enumerate(means[0]):
            assert (mean - mean_of(gradients, index)).abs().amax() < 0.01
