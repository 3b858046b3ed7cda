"""PowerSGD with warm start after gradients have moved to rows and columns that its basis does not see.

Each matrix is one run of its own: the runs of a test are matrices of one shape, and so share one batch of products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from commhooks import Compressor, Hierarchical, PerParameter, make_compressor
from commhooks.compressors.powersgd.blind_rows import EVERY, Probed, replace_blind_rows, with_probes
from tests.commhooks.workers import Workers, normal, zeros
from tests.tiers import rows

pytestmark = pytest.mark.kernels

N, FIRST_STEPS, WORLD_SIZE = 64, 10, 4
HALF = N // 2


class Run(NamedTuple):
    """One matrix: A, in its first rows and columns, is alone at first; then comes B, constant, in its last ones."""

    goes_on: bool
    """Whether A stays when B comes."""
    on_one: bool
    """Whether only one of the ranks has B."""
    seed: int

    def second(self, rank: int) -> Tensor:
        """Return a rank's B."""
        whole = torch.zeros(N, N)
        if rank == 0 or not self.on_one:
            whole[HALF:, HALF:] = torch.randn(HALF, HALF, generator=torch.Generator().manual_seed(self.seed))
        return whole

    def gradient(self, step: int, rank: int, generator: torch.Generator) -> Tensor:
        """Return a rank's gradient, of which A is drawn again in every step."""
        whole = self.second(rank) if step >= FIRST_STEPS else torch.zeros(N, N)
        if self.goes_on or step < FIRST_STEPS:
            whole[:HALF, :HALF] = torch.randn(HALF, HALF, generator=generator)
        return whole


def every_run(seeds: int) -> list[Run]:
    return [Run(*given) for given in itertools.product((False, True), (False, True), range(seeds))]


def shares_sent(compressor: Compressor, rank: int, runs: Sequence[Run], buckets: int = 1) -> list[float]:
    """Return the share of B that each run's means hold over the last N/rank of 3N/rank steps with B."""
    workers = Workers(compressor, WORLD_SIZE, zeros(*[(N, N)] * len(runs)), buckets=buckets)
    generator = torch.Generator().manual_seed(0)
    steps, last = FIRST_STEPS + 3 * N // rank, N // rank
    sent = [torch.zeros(N, N) for _ in runs]
    for step in range(steps):
        means = workers.step([[run.gradient(step, r, generator) for run in runs] for r in range(WORLD_SIZE)])
        for other in means[1:]:
            assert all(torch.equal(a, b) for a, b in zip(means[0], other, strict=True))
        if step >= steps - last:
            sent = [total + mean for total, mean in zip(sent, means[0], strict=True)]
    seconds = [sum((run.second(r) for r in range(WORLD_SIZE)), torch.zeros(N, N)) / WORLD_SIZE for run in runs]
    return [float((got * B).sum() / B.square().sum()) / last for got, B in zip(sent, seconds, strict=True)]


@pytest.mark.parametrize("rank", rows([1, 2, 4], unless=lambda rank: rank == 4))
@pytest.mark.parametrize("seeds", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_gradients_that_move_to_other_rows_and_columns_are_sent(rank: int, seeds: int) -> None:
    shares = shares_sent(make_compressor("powersgd", rank=rank), rank, every_run(seeds))
    print(f"rank {rank}, {len(shares)} runs: {min(shares):.3f} to {max(shares):.3f} of B")
    assert min(shares) >= 0.9


OTHER_FORMS: dict[str, tuple[Callable[[], Compressor], int]] = {
    "twice": (lambda: make_compressor("powersgd", rank=4, iterations=2), 4),
    "square": (lambda: make_compressor("powersgd", rank=4, matrices="most-square"), 4),
    "bucket": (lambda: make_compressor("powersgd", rank=4, matrices="whole-bucket"), 4),
    "adaptive": (lambda: make_compressor("adaptive-rank", rank=6, min_rank=4, max_rank=8, every=10), 4),
    "late": (lambda: make_compressor("powersgd", rank=4, start_after=7), 4),
    "by rules": (
        lambda: PerParameter(
            rules=(("layer0", make_compressor("powersgd", rank=4)),), otherwise=make_compressor("powersgd", rank=5)
        ),
        4,
    ),
    "machines": (lambda: Hierarchical(inner=make_compressor("powersgd", rank=4), size=2), 4),
}
"""Compressors, and the lowest rank that they give to a matrix."""


@pytest.mark.parametrize("form", rows(OTHER_FORMS, unless=lambda form: form in ("twice", "machines")))
def test_every_form_of_a_warm_start_sends_them(form: str) -> None:
    make, rank = OTHER_FORMS[form]
    runs = [Run(goes_on=False, on_one=False, seed=1), Run(goes_on=True, on_one=True, seed=2)]
    assert min(shares_sent(make(), rank, runs, buckets=len(runs))) >= 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_run_resumed_after_rows_were_replaced_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    """It is saved between two comparisons, the first of which replaces a row."""
    given = [Run(goes_on=True, on_one=False, seed=seed) for seed in range(2)]
    workers, resumed = (
        Workers(make_compressor("powersgd", rank=2), 2, zeros(*[(N, N)] * 2, dtype=dtype)) for _ in "ab"
    )
    means = []
    for step in range(2 * EVERY + 3):
        if step == EVERY + 2:
            resumed.resume(workers.saved())
        generator = torch.Generator().manual_seed(step)
        gradients = [[run.gradient(step, r, generator).to(dtype) for run in given] for r in range(2)]
        means = workers.step(gradients)[0]
        if step >= EVERY + 2:
            assert all(torch.equal(a, b) for a, b in zip(means, resumed.step(gradients)[0], strict=True))
    assert means[0][HALF:, HALF:].any()


def probed(M: Tensor, Q: Tensor) -> Probed:
    """Return factors P = M·Q of matrices k×n×m, with what a probe shows."""
    ((P, Q, probe),) = with_probes([(Q @ M.mT, Q)], seed=0)
    torch.matmul(M, probe.direction, out=probe.shown)
    return Probed(P, Q, probe)


def test_only_the_row_that_shows_least_is_replaced_and_only_where_the_others_leave_much() -> None:
    """Row 0 shows column 0 of M, row 1 shows column 1; they hold all of it, nearly all, 1 % of it, or nothing."""
    M, Q = torch.zeros(4, 5, 6), torch.zeros(4, 2, 6)
    Q[:, 0, 0] = Q[:, 1, 1] = 1.0
    for number, rest in enumerate((0.0, 0.01, 1.0, 1.0)):
        M[number, 0, 0], M[number, 1, 1], M[number, 2:, 2:] = 1.0, 0.01 if number < 3 else 0.0, rest
    M[1, 1, 1] = 1.0
    one = probed(M, Q)
    before = one.P.clone()
    replace_blind_rows([one])
    kept = (before == one.P).all(dim=2)
    assert kept.tolist() == [[True, True], [True, True], [True, False], [True, False]]
    assert torch.equal(one.P[3, 1], one.probe.shown[3])


def test_a_basis_that_sees_nothing_is_replaced_at_any_scale_and_among_groups_of_several_ranks() -> None:
    groups = []
    for r, scale in ((1, 1e-30), (2, 1e30), (2, 1.0)):
        M = torch.zeros(2, 40, 30)
        M[:, :, 20:] = normal([M[:, :, 20:]], 1, seed=r)[0][0] * scale
        groups.append(probed(M, torch.eye(30)[:r].repeat(2, 1, 1)))
    replace_blind_rows(groups)
    for one in groups:
        assert torch.equal(one.P[:, 0], one.probe.shown)
        assert not one.P[:, 1:].any()
