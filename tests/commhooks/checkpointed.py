"""A run whose checkpoints are damaged, or lie in another's way, and what it is told."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks import CheckpointError, Compressor, make_compressor
from tests.commhooks.models import wrap


@dataclasses.dataclass
class Told:
    """What one rank was told about one damage, and what it did to the run."""

    damage: str
    text: str = ""
    """Of the error; empty where there was none."""
    changed: bool = False
    """Anything differs from what it was before."""
    restored: bool = False
    """All is as it was when the checkpoint was saved."""


class Network(nn.Module):
    """A model with buffers: some that a checkpoint holds, and a cache that it does not."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.last: nn.Module = nn.Linear(width, 4)
        self.register_buffer("cache", torch.zeros(width), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.last(self.drop(torch.relu(self.norm(self.first(inputs)))))
        return scores


class Renamed(Network):
    """Call the last layer something else."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.head = nn.Identity(), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(super().forward(inputs))
        return scores


def words_of(value: Any) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)} {value.detach().tolist()}"
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield str(key)
            yield from words_of(value[key])
    elif isinstance(value, (list, tuple)):
        for held in value:
            yield from words_of(held)
    else:
        yield repr(value)


class Run:
    """One rank's run."""

    def __init__(
        self,
        directory: Path,
        module: nn.Module | None = None,
        compressor: Compressor | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        scales: bool = True,
    ) -> None:
        self.directory = directory
        self.ddp = wrap("core", module or Network(), bucket_cap_mb=0.0002)
        settings = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        self.optimizer = optimizer(self.ddp.parameters(), lr=0.05, **settings)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scales)
        self.hooks = commhooks.attach(self.ddp, compressor or make_compressor("powersgd", rank=1), scaler=self.scaler)
        self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.scaler.scale(self.ddp(torch.randn(5, 6)).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.steps += 1

    def save(self, **settings: Any) -> Path:
        return commhooks.save_checkpoint(**(self._parts() | {"step": self.steps} | settings))

    def load(self, **settings: Any) -> commhooks.Checkpoint | None:
        return commhooks.load_checkpoint(**(self._parts() | settings))

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.ddp, "optimizer": self.optimizer, "scaler": self.scaler, "hooks": self.hooks}
        return parts | {"directory": self.directory}

    def digest(self) -> str:
        """Tell in short all that a checkpoint restores."""
        hook_state = self.hooks.state_dict()
        parts = [self.ddp.module.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict()]  # type: ignore[union-attr]  # 'Item "Tensor"'
        parts += [hook_state["replicated"], hook_state["local"], hook_state["step"], hook_state["grad_scale"]]
        return hashlib.sha256("\n".join(words_of([*parts, torch.get_rng_state()])).encode()).hexdigest()

    def told(self, damage: str, saved: str = "", before: str = "", **settings: Any) -> Told:
        """Try to load, and return the outcome."""
        before, text = before or self.digest(), ""
        try:
            self.load(**settings)
        except CheckpointError as error:
            text = str(error)
        after = self.digest()
        return Told(damage, text, changed=after != before, restored=after == saved)


def begin(rank: int, folder: Path, name: str = "run", **settings: Any) -> Run:
    torch.manual_seed(rank)
    run = Run(folder / name, **settings)
    run.train(3)
    return run


def listing_of(run: Run) -> list[str]:
    dist.barrier()
    names = sorted(path.name for path in run.directory.iterdir())
    dist.barrier()
    return names
