"""The mean of sparse gradients over Gloo: many at once, over a group of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.communicators import Collective, ProcessGroupCommunicator
from tests.commhooks.models import SparseTables, wrap
from tests.ddp_core.facts import BOTH_DDPS
from tests.tiers import in_turn
from tests.world import on_ranks


class Counting:
    """A process group that counts its all-reduces, and does nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: list[Tensor]) -> Any:
        self.calls += 1
        return torch.futures.Future[None]()


def test_the_group_for_sparse_sums_is_opened_by_the_first_of_them_and_takes_only_these() -> None:
    opened: list[Counting] = []

    def open_another() -> Counting:
        opened.append(Counting())
        return opened[-1]

    group = Counting()
    communicator = ProcessGroupCommunicator(group, open_another)
    communicator._start(Collective("all-reduce", torch.ones(3)))
    assert not opened
    for _ in range(2):
        communicator._start(Collective("all-reduce", torch.eye(3).to_sparse()))
    assert (group.calls, [another.calls for another in opened]) == (1, [2])
    communicator.release()
    assert communicator._for_sparse is None


@on_ranks(2)
@pytest.mark.parametrize(("kind", "policy"), in_turn(BOTH_DDPS, ("fifo", "fused")))
def test_many_sparse_gradients_are_averaged_in_one_step(rank: int, kind: str, policy: Any) -> None:
    """Over one group of two threads, so many sums at a time corrupt the heap of PyTorch 2.13 in seconds."""
    module = SparseTables()
    model = wrap(kind, module)
    handle = commhooks.attach(model, "all-reduce", policy=policy)
    expected = torch.tensor([0.5, 1.0, 0.5, 0, 0, 0]).unsqueeze(1).expand(6, 2)
    for _ in range(20):
        model.zero_grad()
        model(torch.tensor([rank, rank + 1])).backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        assert all(grad is not None and torch.equal(grad.to_dense(), expected) for grad in gradients)
    assert handle.statistics().collectives > 0
