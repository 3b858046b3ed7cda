"""Workers that train by themselves and average rarely, in one process or over a process group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from commhooks import DiLoCo
from commhooks.lockstep import lockstep_connections, step_in_lockstep

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def network() -> nn.Module:
    """Return four layers, of which PowerSGD and codes of blocks compress three."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10)
    )


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 20, generator=generator), torch.randint(0, 10, (8,), generator=generator)


class Worker:
    """One rank's model, inner optimizer and DiLoCo."""

    def __init__(self, rank: int, make: Make = adamw, model: nn.Module | None = None, **settings: Any) -> None:
        self.rank = rank
        self.model = network() if model is None else model
        self.optimizer = make(self.model)
        # With momentum, so that there is state of the outer optimizer, whatever "auto" would choose.
        self.diloco = DiLoCo(self.model, self.optimizer, **{"outer": "published"} | settings)

    @staticmethod
    def gradients(model: nn.Module, rank: int, step: int, scaler: torch.amp.GradScaler | None = None) -> None:
        inputs, targets = batch(rank, step)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        (loss if scaler is None else scaler.scale(loss)).backward()

    def inner_step(self, step: int) -> None:
        self.gradients(self.model, self.rank, step)
        self.optimizer.step()

    def train(self, first: int, last: int) -> None:
        """Run steps first to last - 1 over a process group."""
        for step in range(first, last):
            self.inner_step(step)
            self.diloco.step()

    def save(self) -> dict[str, Any]:
        """Return everything that this rank saves."""
        parts = {"diloco": self.diloco, "model": self.model, "optimizer": self.optimizer}
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}  # type: ignore[attr-defined]

    def load(self, saved: dict[str, Any]) -> None:
        self.diloco.load_state_dict(saved["diloco"])
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


def workers(count: int, make: Make = adamw, **settings: Any) -> list[Worker]:
    """Return workers of one process."""
    return [
        Worker(rank, make, connection=connection, **settings)
        for rank, connection in enumerate(lockstep_connections(count, "fused"))
    ]


def train_in_lockstep(team: Sequence[Worker], first: int, last: int) -> None:
    """Run steps first to last - 1."""
    for step in range(first, last):
        for worker in team:
            worker.inner_step(step)
        step_in_lockstep([worker.diloco for worker in team])
