"""The mean of sparse gradients, whose rows are gathered: in lockstep, and many at once over Gloo."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import commhooks
from commhooks.communicators import run_lockstep
from commhooks.compressor import Context
from commhooks.compressors.all_reduce import sparse_mean
from tests.commhooks.models import wrap
from tests.commhooks.ranks import run_ranks


def rows(numbers: list[int], scale: float) -> Tensor:
    """Return a sparse (6, 2) tensor with these rows, each as often as it is named."""
    values = torch.arange(1.0, 2 * len(numbers) + 1, dtype=torch.float64).view(-1, 2) * scale
    return torch.sparse_coo_tensor(torch.tensor([numbers], dtype=torch.long), values, (6, 2), check_invariants=False)


def means(gradients: list[Tensor]) -> list[Tensor]:
    exchanges = [sparse_mean(one, Context(rank, len(gradients), 0)) for rank, one in enumerate(gradients)]
    return [result.mean for result in run_lockstep(exchanges)]


@pytest.mark.parametrize(
    "brought",
    [[[0, 5, 0], [3]], [[], [1, 1]], [[], []], [[5, 4, 3, 2], [5], [], [0, 5]]],
    ids=str,
)
def test_ranks_bring_different_numbers_of_rows(brought: list[list[int]]) -> None:
    gradients = [rows(numbers, 4.0 * (rank + 1)) for rank, numbers in enumerate(brought)]
    before = [one.clone() for one in gradients]
    expected = torch.stack([one.to_dense() for one in gradients]).sum(0) / len(gradients)
    for mean in means(gradients):
        assert mean.is_coalesced()
        assert torch.equal(mean.to_dense(), expected)
    assert all(torch.equal(a._values(), b._values()) for a, b in zip(gradients, before, strict=True))


def test_a_rank_without_rows_follows_the_others_and_those_who_disagree_hear_of_it() -> None:
    entries = torch.eye(4, dtype=torch.float64).to_sparse()
    nothing = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 4).double(), (4, 4), check_invariants=False)
    for mean in means([nothing, entries]):
        assert torch.equal(mean.to_dense(), torch.eye(4, dtype=torch.float64) / 2)
    with pytest.raises(commhooks.GradientError, match=r"\[\[4, 2\], \[4, 1\]\] \(rows, sparse dimensions\)"):
        means([entries, torch.eye(4, dtype=torch.float64).to_sparse(1)])


class Tables(nn.ModuleList):
    """Many sparse embeddings: each is a bucket of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(6, 2, sparse=True) for _ in range(20))

    def forward(self, words: Tensor) -> Tensor:
        return torch.stack([table(words).sum() for table in self]).sum()


def many_tables(rank: int, kind: str, policy: str) -> bool:
    """Train; Gloo's own sums of sparse gradients, so many at a time, corrupt the heap of PyTorch 2.13 in seconds."""
    module = Tables()
    model = wrap(kind, module)
    handle = commhooks.attach(model, "all-reduce", policy=policy)
    expected = torch.tensor([0.5, 1.0, 0.5, 0, 0, 0]).unsqueeze(1).expand(6, 2)
    right = True
    for _ in range(20):
        model.zero_grad()
        model(torch.tensor([rank, rank + 1])).backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        right &= all(grad is not None and torch.equal(grad.to_dense(), expected) for grad in gradients)
    return right and handle.statistics().collectives > 0


@pytest.mark.parametrize("policy", ["fifo", "fused"])
@pytest.mark.parametrize("kind", ["core", "torch"])
def test_many_sparse_gradients_are_averaged_in_one_step(kind: str, policy: str) -> None:
    assert run_ranks(many_tables, 2, kind, policy) == [True, True]
