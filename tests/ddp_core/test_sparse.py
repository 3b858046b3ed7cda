"""Sums of sparse gradients: what comes out, and that nothing is corrupted when many are under way."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.collectives import all_reduce
from ddp_core.features.sparse import group_for_sparse_sums
from tests import bounds
from tests.ddp_core.facts import Facts
from tests.ddp_core.models import wrap

facts = Facts(world_size=3, turns=[10, 30])


def rows(numbers: list[int], scale: float) -> Tensor:
    """Return a sparse (6, 2) tensor with these rows, each as often as it is named."""
    values = torch.arange(1.0, 2 * len(numbers) + 1, dtype=torch.float64).view(-1, 2) * scale
    return torch.sparse_coo_tensor(torch.tensor([numbers], dtype=torch.long), values, (6, 2), check_invariants=False)


def everyone() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


@facts
def ranks_bring_different_numbers_of_rows(rank: int) -> None:
    group = group_for_sparse_sums(everyone(), torch.device("cpu"))
    cases: list[list[list[int]]] = [[[0, 5, 0], [3], [5, 4, 3, 2]], [[], [1, 1], [2]], [[4], [], []], [[], [], []]]
    for brought in cases:
        contributions = [rows(numbers, other + 1) for other, numbers in enumerate(brought)]
        expected = torch.stack([one.to_dense() for one in contributions]).sum(0)
        all_reduce(group, contributions[rank]).wait()
        assert torch.equal(contributions[rank].to_dense(), expected)


@facts
def a_group_has_one_group_for_sparse_sums_and_that_one_has_one_thread(rank: int) -> None:
    cpu = torch.device("cpu")
    sparse = group_for_sparse_sums(everyone(), cpu)
    assert group_for_sparse_sums(everyone(), cpu) is sparse is not everyone()
    assert sparse.options._threads == 1
    pair = dist.new_group([0, 1])
    if rank < 2:
        assert group_for_sparse_sums(pair, cpu).size() == 2


@facts
def many_may_be_under_way_at_once(rank: int, rounds: int) -> None:
    """Over one group of two threads, 50 at a time end a process of PyTorch 2.13 within a second or two."""
    sparse = group_for_sparse_sums(everyone(), torch.device("cpu"))
    expected = [torch.stack([rows([other, row], 1.0).to_dense() for other in range(3)]).sum(0) for row in range(6)]
    for _ in range(rounds):
        sums = [rows([rank, number % 6], 1.0) for number in range(50)]
        works = [all_reduce(sparse, one) for one in sums]
        works += [all_reduce(everyone(), torch.ones(2)) for _ in sums]
        for work in works:
            work.wait()
        for number, one in enumerate(sums):
            assert torch.equal(one.to_dense(), expected[number % 6])


class Words(nn.Module):
    """A sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)

    def forward(self, word: Tensor) -> Tensor:
        return torch.as_tensor(self.words(word).sum())


class Meet(torch.autograd.Function):
    """Meets the other ranks in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dist.barrier(ctx.group)
        return grad, None


@facts
def a_sum_ends_though_a_rank_is_not_at_the_end_of_its_backward_pass(rank: int) -> None:
    """Rank 0 meets the others within its backward pass, they meet it behind theirs: to launch is all a sum asks for."""
    ddp, other = wrap(Words().double()), dist.new_group()
    leaf = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        ddp.zero_grad()
        early = leaf if rank else Meet.apply(leaf * 1, other)  # type: ignore[no-untyped-call]  # 'Call to untyped function "apply"'
        (ddp(torch.tensor([rank])) + early).backward()
        if rank:
            dist.barrier(other)
        bounds.assert_equal_in_float64(
            ddp.module.words.weight.grad.to_dense()[:3], torch.full((3, 2), 1 / 3, dtype=torch.float64)
        )


test_fact = facts.tests()
