"""Parameters of unusual shape, layout, dtype and use."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from tests import bounds
from tests.cases import BY_NAME, FORMS, Case
from tests.commhooks.models import wrap
from tests.commhooks.ranks import of_every_rank
from tests.commhooks.workers import largest
from tests.tiers import in_turn, thorough
from tests.world import on_ranks

ORDINARY = [
    ("core", "fifo", torch.bfloat16, FORMS[::3]),
    ("core", "fused", torch.float16, FORMS[1::3]),
    ("torch", "fused", torch.float32, FORMS[2::3]),
]
"""Each DDP, policy, dtype and form occurs; `make test-all` has every form with each, and soaks have all rows."""
EACH = thorough((kind, policy, dtype, FORMS) for kind, policy, dtype, _ in ORDINARY)
EVERY = itertools.product(
    ("core", "torch"), ("fifo", "fused"), (torch.float32, torch.float16, torch.bfloat16), [list(BY_NAME)]
)
REST = [pytest.param(*one, marks=pytest.mark.soak) for one in EVERY]
STEPS = 6


class Odd(nn.Module):
    """Parameters: a 0-dim, an empty, a channels-last, a frozen, a tied, a sometimes unused and perhaps a sparse one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.conv = nn.Conv2d(3, 16, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.sometimes = nn.Linear(16, 16)
        self.table = nn.Embedding(50, 16, sparse=dtype == torch.float32)  # sparse fp16 cannot be added on the CPU
        self.head = nn.Linear(16, 40)
        self.to(dtype)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # "no overload matches"

    def forward(self, images: Tensor, words: Tensor, use: bool) -> Tensor:
        hidden = self.conv(images).mean((2, 3)) * self.scale + self.table(words)
        hidden = self.second(torch.relu(self.first(hidden))) + self.empty.sum()
        if use:
            hidden = self.sometimes(hidden)
        scores: Tensor = self.head(hidden).float()
        return scores


def _in_words(one: object) -> str:
    named = {len(BY_NAME): "every row", len(FORMS): "every form"}
    return named.get(len(one), "forms") if isinstance(one, list) else str(one)


@on_ranks(2)
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("kind", "policy", "dtype", "names"),
    [*ORDINARY, *EACH, *REST],
    ids=_in_words,
)
def test_a_model_of_odd_parameters_trains_with_every_case(
    rank: int, kind: str, policy: str, dtype: torch.dtype, names: list[str]
) -> None:
    for case in map(BY_NAME.__getitem__, names):
        if case.exchanges:
            losses = train(rank, kind, policy, dtype, case)
            by_step = [sum(of_ranks) for of_ranks in zip(*of_every_rank(losses), strict=True)]
            trains = sum(by_step[3:]) < sum(by_step[:3])  # other parameters are used in every third step
            assert trains or not case.sends_small, case.name


def train(rank: int, kind: str, policy: Any, dtype: torch.dtype, case: Case) -> list[float]:
    torch.manual_seed(0)
    module, alone = Odd(dtype), Odd(dtype)
    model = wrap(kind, module, find_unused_parameters=True, bucket_cap_mb=0.002)
    commhooks.attach(model, case.make(), policy=policy)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)
    torch.manual_seed(rank + 1)
    images, words = torch.randn(32, 3, 6, 6).to(dtype), torch.randint(0, 50, (32,))
    labels = torch.randint(0, 40, (32,))
    losses, terms = [], [0.0] * len(list(module.parameters()))
    for step in range(STEPS):
        alone.load_state_dict(module.state_dict())
        for net in (alone, model):
            net.zero_grad()
            loss = nn.functional.cross_entropy(net(images, words, use=(step + rank) % 3 == 0), labels)
            loss.backward()
        own = in_one([p.detach() for p in module.parameters()])
        assert all(torch.equal(own, other) for other in copies(own)), f"{case}, step {step}: replicas differ"
        assert wrong_means(module, alone, case, step, terms) == [], f"{case}, step {step}"
        losses.append(loss.item())
        optimizer.step()
    return losses


def in_one(tensors: list[Tensor]) -> Tensor:
    """Return all elements in one tensor, for one collective: float64 holds every dtype's exactly."""
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def copies(tensor: Tensor) -> list[Tensor]:
    """Return every rank's copy of a tensor."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return gathered


def over_ranks(tensors: list[Tensor]) -> tuple[list[Tensor], list[float]]:
    """Return the mean of each tensor over the ranks, and its largest magnitude on any of them, in float64."""
    everywhere = torch.stack(copies(in_one(tensors)))
    sizes = [tensor.numel() for tensor in tensors]
    means = [part.view(t.shape) for part, t in zip(everywhere.mean(0).split(sizes), tensors, strict=True)]
    return means, [largest(part) for part in everywhere.split(sizes, dim=1)]


def wrong_means(module: Odd, alone: Odd, case: Case, step: int, terms: list[float]) -> list[str]:
    """Name the parameters whose gradient is not the mean over the ranks, where it should be.

    A sparse one is averaged by an all-reduce under every case.
    terms: by parameter, the largest element that any rank has had to send so far; kept up to date here.
    """
    wrong = []
    nobody_uses = (step % 3, (step + 1) % 3).count(0) == 0
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]
    means, _ = over_ranks([gradient.to_dense() for gradient in gradients])
    _, now = over_ranks([magnitudes(gradient) for gradient in gradients])
    terms[:] = map(max, terms, now)
    for (name, parameter), mean, largest_term in zip(module.named_parameters(), means, terms, strict=True):
        if not parameter.requires_grad or (nobody_uses and name.startswith("sometimes")):
            continue
        if parameter.grad is None or parameter.grad.shape != parameter.shape or parameter.grad.dtype != parameter.dtype:
            wrong.append(f"{name} has gradient {parameter.grad}")
        elif case.lossless or parameter.grad.is_sparse:
            error = largest(parameter.grad.to_dense().double() - mean)
            bound = largest_term * rounding(case, parameter)
            wrong += [f"{name} is {error} away, of {bound} at most"] * (error > bound)
    return wrong


def magnitudes(gradient: Tensor) -> Tensor:
    """Return the sum of the magnitudes of each element's terms; of a dense gradient there is one."""
    if not gradient.is_sparse:
        return gradient.abs()
    return torch.sparse_coo_tensor(gradient._indices(), gradient._values().abs(), gradient.shape).to_dense()


def rounding(case: Case, parameter: nn.Parameter) -> float:
    """Return how far a mean over two ranks may be off, relative to the largest term.

    A sparse gradient's row is the sum of at most 64 words' own, in any order. With error feedback a mean lacks what a
    cast has just cut off, and has what the one before did.
    """
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        return 64 * bounds.unit_roundoff(parameter.dtype)
    bound = bounds.of_mean(2, parameter.dtype)
    if case.wire is not None:
        bound += bounds.of_mean(2, case.wire) + 2 * bounds.unit_roundoff(case.wire) * case.error_feedback
    return bound


class Sharing(nn.Module):
    """Let a sparse gradient share its values with one that flows on, for a tenth of a second, to another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.table = nn.Embedding(8, 4, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        scaled = self.scale * torch.ones(8, 4)
        scaled.register_hook(lambda _: time.sleep(0.1))
        both = scaled + self.table(words)  # backward hands the same tensor to both terms, first to the table
        loss: Tensor = (both * torch.ones_like(both)).sum()
        return loss


@on_ranks(2)
@pytest.mark.parametrize(("kind", "policy"), in_turn(["core", "torch"], ["fifo", "fused"]))
def test_nothing_is_written_into_a_sparse_gradient_that_shares_its_values(rank: int, kind: str, policy: Any) -> None:
    """PyTorch's own DDP divides it in place, with a hook and without: there, and here, 16 came out on its DDP."""
    module = Sharing()
    model = wrap(kind, module, bucket_cap_mb=1e-5)
    commhooks.attach(model, "all-reduce", policy=policy)
    for _ in range(3):
        model.zero_grad()
        model(torch.arange(8)).backward()
        assert module.scale.grad is not None and module.scale.grad.item() == 32.0
