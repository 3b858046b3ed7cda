"""Sums of sparse gradients: what comes out, and that nothing is corrupted when many are under way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.sparse import SparseSum
from tests.ddp_core.facts import Facts

facts = Facts(world_size=3)


def rows(numbers: list[int], scale: float, size: int = 6) -> Tensor:
    """Return a sparse (size, 2) tensor with these rows, each as often as it is named."""
    values = torch.arange(1.0, 2 * len(numbers) + 1, dtype=torch.float64).view(-1, 2) * scale
    return torch.sparse_coo_tensor(torch.tensor([numbers], dtype=torch.long), values, (size, 2), check_invariants=False)


def sum_of(gradient: Tensor) -> SparseSum:
    group = dist.group.WORLD
    assert group is not None, "the world has no process group"
    return SparseSum(group, gradient)


def total(contributions: list[Tensor]) -> Tensor:
    return torch.stack([one.to_dense() for one in contributions]).sum(0)


@facts
def ranks_bring_different_numbers_of_rows(rank: int) -> None:
    cases: list[list[list[int]]] = [
        [[0, 5, 0], [3], [5, 4, 3, 2]],
        [[], [1, 1], [2]],
        [[4], [], []],
        [[], [], []],
    ]
    for brought in cases:
        contributions = [rows(numbers, other + 1) for other, numbers in enumerate(brought)]
        before = contributions[rank].clone()
        result = sum_of(contributions[rank]).wait()
        assert result.is_coalesced()
        assert torch.equal(result.to_dense(), total(contributions))
        assert torch.equal(contributions[rank]._values(), before._values())
        assert torch.equal(contributions[rank]._indices(), before._indices())


@facts
def a_rank_without_rows_follows_the_others_sparse_dimensions(rank: int) -> None:
    entries = torch.eye(4, dtype=torch.float64).to_sparse() * (rank + 1)
    nothing = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 4).double(), (4, 4), check_invariants=False)
    result = sum_of(nothing if rank == 1 else entries).wait()
    assert torch.equal(result.to_dense(), 4 * torch.eye(4, dtype=torch.float64))


@facts
def ranks_that_disagree_on_the_sparse_dimensions_all_hear_of_it(rank: int) -> None:
    sum_under_way = sum_of(torch.eye(4).to_sparse(2 if rank else 1))
    with pytest.raises(RuntimeError, match=r"\[\[4, 1\], \[4, 2\], \[4, 2\]\] \[rows, sparse dimensions\]"):
        sum_under_way.wait()


@facts
def many_may_be_under_way_at_once(rank: int) -> None:
    """Gloo's own sums, 50 at a time, end a process of PyTorch 2.13 within a second or two, on one rank already."""
    for _ in range(20):
        sums = [sum_of(rows([rank, number % 6], 1.0)) for number in range(50)]
        works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in sums]
        for number, under_way in enumerate(sums):
            expected = total([rows([other, number % 6], 1.0) for other in range(3)])
            assert torch.equal(under_way.wait().to_dense(), expected)
        for work in works:
            work.wait()


test_fact = facts.tests()
