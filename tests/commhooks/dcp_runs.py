"""Runs that `torch.distributed.checkpoint` saves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

import commhooks
from commhooks import Compressor, Handle, PowerSGDState, make_compressor
from tests.commhooks.models import wrap

COMPRESSORS = {
    "powersgd": make_compressor("powersgd", rank=2),
    "powersgd from step 3": make_compressor("powersgd", rank=2, start_after=3),
    "alternating": make_compressor("powersgd", rank=2, alternating=True),
    "fp16 with error feedback": make_compressor("fp16", error_feedback=True),
    "all-reduce": make_compressor("all-reduce"),
    "whole bucket": make_compressor("powersgd", rank=2, matrices="whole-bucket"),
}
HOOK = "powerSGD_hook"
"""Not attached, but registered with a state of its own."""


def network(*, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(1, 12, 3)
    return nn.Sequential(first, nn.Flatten(), nn.Linear(192, 24), nn.Tanh(), nn.Linear(24, 30), nn.Linear(30, 10, bias))


@dataclasses.dataclass
class Run:
    """One rank's model, optimiser and hook."""

    ddp: nn.Module
    optimizer: torch.optim.Optimizer
    hooks: Handle[Any] | PowerSGDState

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            inputs = torch.randn(6, 1, 6, 6, generator=generator)
            targets = torch.randint(0, 10, (6,), generator=generator)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.ddp(inputs), targets).backward()
            self.optimizer.step()

    def parts(self) -> dict[str, Any]:
        """Return what is handed to DCP."""
        optimizer = get_optimizer_state_dict(self._module, self.optimizer)
        return {"model": self._module, "optimizer": optimizer, "hooks": self.hooks}

    def load(self, path: Path, how: str) -> None:
        parts = self.parts()
        if how == "load_distributed":
            commhooks.load_distributed(path, parts.pop("hooks"))
        load(parts, checkpoint_id=path)
        set_optimizer_state_dict(self._module, self.optimizer, parts["optimizer"])

    def result(self) -> dict[str, Any]:
        """Return everything that must be the same after a resume."""
        return {
            "model": self._module.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "hooks": memory_of(self.hooks),
        }

    def end(self) -> None:
        if isinstance(self.hooks, Handle):
            self.hooks.close()

    @property
    def _module(self) -> nn.Module:
        module = self.ddp.module
        assert isinstance(module, nn.Module)
        return module


def memory_of(hooks: Handle[Any] | PowerSGDState) -> dict[str, Any]:
    state = hooks.state_dict()
    return {name: state[name] for name in ("step", "grad_scale", "replicated", "local")}


def begin(kind: str, what: str | Compressor, policy: Any = "fifo", *, bias: bool = True) -> Run:
    ddp = wrap(kind, network(bias=bias), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    if what != HOOK:
        compressor = what if isinstance(what, Compressor) else COMPRESSORS[what]
        return Run(ddp, optimizer, commhooks.attach(ddp, compressor, policy=policy))
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    state.bind(ddp)
    ddp.register_comm_hook(state, commhooks.powerSGD_hook)  # type: ignore[operator]  # 'Tensor not callable'
    return Run(ddp, optimizer, state)
