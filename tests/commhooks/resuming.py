"""Runs that can be saved and resumed, and how far one is from another."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import torch
from torch import Tensor, nn

from commhooks import Handle, PowerSGDState


@dataclasses.dataclass
class Run:
    """One rank's model, optimiser and hook."""

    ddp: Any  # a DistributedDataParallel: `ddp.module` is a module
    optimizer: torch.optim.Optimizer
    hooks: Handle[Any] | PowerSGDState

    def train(self, rank: int, first: int, last: int) -> list[Tensor]:
        """Run steps first to last - 1; return what the last one changed."""
        before = [p.detach().clone() for p in self.ddp.parameters()]
        for step in range(first, last):
            before = [p.detach().clone() for p in self.ddp.parameters()]
            inputs, targets = batch(rank, step)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.ddp(inputs.to(before[0].dtype)), targets).backward()
            self.optimizer.step()
        return [p.detach() - old for p, old in zip(self.ddp.parameters(), before, strict=True)]

    def result(self) -> dict[str, Any]:
        """Return everything that must be the same after a resume."""
        state = self.hooks.state_dict()
        return {
            "model": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "hooks": {name: state[name] for name in ("step", "replicated", "local", "grad_scale")},
        }


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 16, 24), nn.Dropout(0.1), nn.Linear(24, 30),
        nn.Tanh(), nn.Linear(30, 10),
    )  # fmt: skip


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 1, 6, 6, generator=generator), torch.randint(0, 10, (6,), generator=generator)


def distance(ours: Any, theirs: Any) -> float:
    """Return the largest difference of any two tensors or numbers; infinity if the structure differs, or at a NaN."""
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return float("inf")
        return max((distance(ours[key], theirs[key]) for key in ours), default=0.0)
    if isinstance(ours, list):
        return max((distance(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
    if isinstance(ours, Tensor):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return float("inf")
        if torch.equal(ours, theirs):
            return 0.0
        wide = torch.promote_types(ours.dtype, torch.float64)  # complex numbers stay complex
        return float((ours.to(wide) - theirs.to(wide)).abs().nan_to_num(math.inf, math.inf).max())
    return 0.0 if ours == theirs else float("inf")


def roundtrip(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read: dict[str, Any] = torch.load(file)
    return read
