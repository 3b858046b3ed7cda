"""The mean of sparse gradients over Gloo: many at once, over a group of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commhooks
from commhooks.communicators import Collective, ProcessGroupCommunicator
from tests.commhooks.models import wrap
from tests.commhooks.ranks import be_impatient
from tests.commhooks.told import told_by
from tests.ddp_core.facts import BOTH_DDPS
from tests.tiers import in_turn
from tests.world import on_ranks, stay_away, tell


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


class Tables(nn.ModuleList):
    """Many sparse embeddings: each is a bucket of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(6, 2, sparse=True) for _ in range(20))

    def forward(self, words: Tensor) -> Tensor:
        return torch.stack([table(words).sum() for table in self]).sum()


@on_ranks(2)
@pytest.mark.parametrize(("kind", "policy"), in_turn(BOTH_DDPS, ("fifo", "fused")))
def test_many_sparse_gradients_are_averaged_in_one_step(rank: int, kind: str, policy: Any) -> None:
    """Over one group of two threads, so many sums at a time corrupt the heap of PyTorch 2.13 in seconds."""
    module = Tables()
    model = wrap(kind, module)
    handle = commhooks.attach(model, "all-reduce", policy=policy)
    expected = torch.tensor([0.5, 1.0, 0.5, 0, 0, 0]).unsqueeze(1).expand(6, 2)
    for _ in range(20):
        model.zero_grad()
        model(torch.tensor([rank, rank + 1])).backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        assert all(grad is not None and torch.equal(grad.to_dense(), expected) for grad in gradients)
    assert handle.statistics().collectives > 0


@on_ranks(2, check_exit=False)
@pytest.mark.parametrize("kind", ["core", pytest.param("torch", marks=pytest.mark.soak)])
def test_a_rank_that_is_late_for_the_first_sparse_sum_is_named_after_hook_timeout(rank: int, kind: str) -> None:
    """Rank 1 is kept away where the group for sparse sums is opened."""
    be_impatient()
    model = wrap(kind, Tables())
    commhooks.attach(model, "powersgd", hook_timeout=0.5)
    loss = model(torch.tensor([rank]))
    if rank == 1:
        stay_away()
    told = told_by(loss.backward)
    tell(rank)
    assert rank or "could not connect to every rank within 0.5 s. Missing: rank 1" in told.text
