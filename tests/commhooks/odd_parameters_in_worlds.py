"""What the tests of odd parameters run on every rank."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from tests.cases import CASES, Case
from tests.commhooks.models import wrap
from tests.commhooks.workers import relative

STEPS = 6


class Odd(nn.Module):
    """Have a 0-dim, an empty, a channels-last, a frozen, a tied, a sometimes unused and perhaps a sparse parameter."""

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


def every_case(rank: int, kind: str, policy: str, dtype: torch.dtype) -> tuple[dict[str, list[float]], list[str]]:
    """Train with every case that exchanges; return the losses by case, and what was wrong."""
    losses: dict[str, list[float]] = {}
    wrong: list[str] = []
    for case in CASES:
        if case.exchanges:
            losses[case.name] = train(rank, kind, policy, dtype, case, wrong)
    return losses, wrong


def train(rank: int, kind: str, policy: str, dtype: torch.dtype, case: Case, wrong: list[str]) -> list[float]:
    torch.manual_seed(0)
    module, alone = Odd(dtype), Odd(dtype)
    model = wrap(kind, module, find_unused_parameters=True, bucket_cap_mb=0.002)
    commhooks.attach(model, case.make(), policy=policy)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02)
    torch.manual_seed(rank + 1)
    images, words = torch.randn(32, 3, 6, 6).to(dtype), torch.randint(0, 50, (32,))
    labels = torch.randint(0, 40, (32,))
    losses = []
    for step in range(STEPS):
        alone.load_state_dict(module.state_dict())
        for net in (alone, model):
            net.zero_grad()
            loss = nn.functional.cross_entropy(net(images, words, use=(step + rank) % 3 == 0), labels)
            loss.backward()
        own = in_one([p.detach() for p in module.parameters()])
        if not all(torch.equal(own, other) for other in copies(own)):
            wrong.append(f"{case}, step {step}: replicas differ")
        wrong += [f"{case}, step {step}: {name}" for name in wrong_means(module, alone, case, step)]
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


def means_over_ranks(tensors: list[Tensor]) -> list[Tensor]:
    """Return the mean of each tensor over the ranks, in float64."""
    mean = in_one(tensors)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    parts = mean.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def wrong_means(module: Odd, alone: Odd, case: Case, step: int) -> list[str]:
    """Name the parameters whose gradient is not the mean over the ranks, where it should be.

    A sparse one is averaged by an all-reduce under every case: a row is the sum of at most 64 words' gradients, in any
    order. Elsewhere residuals of earlier steps may be as large as what a wire's dtype cuts off, and the gradient's own
    dtype cuts too.
    """
    wrong = []
    nobody_uses = (step % 3, (step + 1) % 3).count(0) == 0
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in alone.parameters()]
    for (name, parameter), mean in zip(module.named_parameters(), means_over_ranks(gradients), strict=True):
        if not parameter.requires_grad or (nobody_uses and name.startswith("sometimes")):
            continue
        if parameter.grad is None or parameter.grad.shape != parameter.shape or parameter.grad.dtype != parameter.dtype:
            wrong.append(f"{name} has gradient {parameter.grad}")
        elif case.lossless or parameter.grad.is_sparse:
            error = relative(parameter.grad.to_dense().double() - mean, mean)
            eps = torch.finfo(parameter.dtype).eps
            bound = 64 * eps if parameter.grad.is_sparse else 2 * case.tolerance + 2 * eps
            wrong += [f"{name} is {error} away"] * (error > bound)
    return wrong


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


def shared_values(rank: int, kind: str, policy: str) -> list[float]:
    """Return the gradient of a parameter whose gradient shares its values with a sparse one, in 3 steps."""
    module = Sharing()
    model = wrap(kind, module, bucket_cap_mb=1e-5)
    commhooks.attach(model, "all-reduce", policy=policy)
    gradients = []
    for _ in range(3):
        model.zero_grad()
        model(torch.arange(8)).backward()
        assert module.scale.grad is not None
        gradients.append(module.scale.grad.item())
    return gradients
