"""The guard under Accelerate and Lightning: a word of each way to bypass the wrapper, and none of what is sound.

Plain runs, and those that accumulate and clip, are those of the frameworks' own tests.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import commhooks
import ddp_core
from commhooks.integrations.lightning import DDPCoreStrategy
from ddp_core.guard import NotAveragedError, NotAveragedWarning
from tests.frameworks.huggingface import settle_in
from tests.frameworks.launch import run_ranks
from tests.frameworks.lightning_in_worlds import digest, trainer_with
from tests.guard.situations import CORE, OPTIMIZERS, RAISES, RIGHT, WARNS, WRAPPERS, Run
from tests.world import run_world

pytestmark = pytest.mark.frameworks

Ended = tuple[str, str]
"""What the guard made of a run, or the error of another kind; and a digest of the parameters."""
ACCELERATE = {"a layer of the unwrapped model": RAISES, "all passes in no_sync": RAISES, "steps in no_sync": WARNS}
LIGHTNING = {
    "the inner module in training_step": RIGHT,  # Lightning calls training_step inside the wrapper's forward pass
    "a pass behind Lightning's back": RAISES,
    "all passes in no_sync": RAISES,
}


def in_every_kind(rank: int, act: Callable[..., Any], kinds: Mapping[str, str]) -> dict[tuple[str, str], Ended]:
    """Run `act` in every kind under every wrapper; optimizers take turns, so that any two of the three meet."""
    settle_in(rank)
    found = {}
    for number, kind in enumerate(kinds):
        for place, wrapper in enumerate(WRAPPERS):
            run = Run(wrapper, OPTIMIZERS[(number + place) % len(OPTIMIZERS)], rank)
            module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
            with warnings.catch_warnings(record=True, action="always") as caught:
                try:
                    act(kind, run, module)
                except NotAveragedError:
                    found[kind, wrapper] = RAISES, ""
                    continue
            words = any(issubclass(warning.category, NotAveragedWarning) for warning in caught)
            found[kind, wrapper] = WARNS if words else RIGHT, digest(module.state_dict())
    return found


def equip(wrapper: str, model: Any) -> None:
    """Attach or register what belongs to a wrapper."""
    if "attach" in wrapper:
        commhooks.attach(model, "fp16")
    if "hook" in wrapper:
        model.register_comm_hook(None, commhooks.bf16_compress_hook)


def under_accelerate(kind: str, run: Run, module: nn.Module) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: Any
    if "ddp_core" in run.wrapper:
        model = ddp_core.DistributedDataParallel(accelerator.prepare_model(module, evaluation_mode=True))
    else:
        model = accelerator.prepare(module)
    equip(run.wrapper, model)
    optimizer: Any = accelerator.prepare(run.optimizer_of(module.parameters()))
    for _ in range(4):
        if kind == "a layer of the unwrapped model":
            accelerator.backward(run.loss(model.module[0]))
        else:
            with accelerator.no_sync(model):
                accelerator.backward(run.loss(model))
                if kind == "steps in no_sync":
                    optimizer.step()
        if kind != "steps in no_sync":
            optimizer.step()
        optimizer.zero_grad()


def under_lightning(kind: str, run: Run, module: nn.Module) -> None:
    strategy = DDPCoreStrategy if "ddp_core" in run.wrapper else DDPStrategy
    samples = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    trainer = trainer_with(Equips(run.wrapper), strategy=strategy, max_epochs=1)
    trainer.fit(Network(kind, run, module), DataLoader(TensorDataset(samples), 6))


class Equips(pl.Callback):
    """Attaches or registers what belongs to a wrapper, once there is one."""

    def __init__(self, wrapper: str) -> None:
        self.wrapper = wrapper

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.wrapper != CORE:
            equip(self.wrapper, trainer.strategy.model)


class Network(pl.LightningModule):
    """Trains in one of the ways of LIGHTNING."""

    def __init__(self, kind: str, run: Run, net: nn.Module) -> None:
        super().__init__()
        self.net, self.kind = net, kind
        self.make = run.optimizer_of
        self.automatic_optimization = kind == "the inner module in training_step"

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        model: Any = self.trainer.strategy.model
        if self.automatic_optimization:
            return model.module.net(batch[0]).square().mean()  # type: ignore[no-any-return]  # 'Returning Any'
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        with model.no_sync() if self.kind == "all passes in no_sync" else contextlib.nullcontext():
            self.manual_backward(self.loss(batch))
        if self.kind == "a pass behind Lightning's back":
            self.loss(batch).backward()
        optimizer.step()
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


def check(expected: Mapping[str, str], ranks: list[dict[tuple[str, str], Ended]]) -> None:
    """Raise unless each run ended as expected, and with equal replicas if nothing was said."""
    first, second = ranks
    for (of_kind, wrapper), (kind, parameters) in first.items():
        other = second[of_kind, wrapper]
        assert expected[of_kind] in (kind, other[0]), f"{of_kind}, {wrapper}: {kind}, {other}"
        assert expected[of_kind] != RIGHT or other == (kind, parameters), f"{of_kind}, {wrapper}: replicas differ"


def test_accelerate_meets_every_kind_of_bypass_under_every_wrapper() -> None:
    check(ACCELERATE, run_world(in_every_kind, 2, under_accelerate, ACCELERATE, timeout=120, check_exit=False))


def test_lightning_meets_every_kind_of_bypass_under_every_wrapper() -> None:
    ranks = run_ranks(in_every_kind, 2, under_lightning, LIGHTNING, timeout=150, check_exit=False)
    check(LIGHTNING, ranks)
