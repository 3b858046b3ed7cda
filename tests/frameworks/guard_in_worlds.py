"""What the tests of the guard under Accelerate and Lightning run on every rank."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import commhooks
import ddp_core
from commhooks.integrations.lightning import DDPCoreStrategy
from ddp_core.guard import NotAveragedError, NotAveragedWarning
from tests.frameworks.lightning_in_worlds import digest, trainer_with
from tests.guard.situations import ADAMW, CORE, OPTIMIZERS, RAISES, RIGHT, WARNS, WRAPPERS

STEPS = 4
Ended = tuple[str, str]
"""What the guard made of a run, or the error of another kind; and a digest of the parameters."""


def cover(kinds: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield kinds, wrappers and optimizers, so that any two of them meet."""
    for number, kind in enumerate(kinds):
        for place, wrapper in enumerate(WRAPPERS):
            yield kind, wrapper, OPTIMIZERS[(number + place) % len(OPTIMIZERS)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == ADAMW:
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def equip(wrapper: str, model: Any) -> None:
    """Attach or register what belongs to a wrapper."""
    if "attach" in wrapper:
        commhooks.attach(model, "fp16")
    if "hook" in wrapper:
        model.register_comm_hook(None, commhooks.bf16_compress_hook)


def ended(act: Callable[[], None], module: nn.Module) -> Ended:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            act()
        except NotAveragedError:
            return RAISES, ""
    words = any(issubclass(warning.category, NotAveragedWarning) for warning in caught)
    return WARNS if words else RIGHT, digest(module.state_dict())


# ---------------------------------------------------------------- Accelerate

ACCELERATE = {
    "plain": RIGHT,
    "accumulated and clipped": RIGHT,
    "the unwrapped model": RAISES,
    "a layer of the unwrapped model": RAISES,
    "all passes in no_sync": RAISES,
    "steps in no_sync": WARNS,
}


def under_accelerate(rank: int) -> dict[str, Ended]:
    return {", ".join(case): _accelerate(rank, *case) for case in cover(ACCELERATE)}


def _accelerate(rank: int, kind: str, wrapper: str, optimizer_name: str) -> Ended:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 if "accumulated" in kind else 1)
    module = network()
    model: Any
    if "ddp_core" in wrapper:
        model = ddp_core.DistributedDataParallel(accelerator.prepare_model(module, evaluation_mode=True))
    else:
        model = accelerator.prepare(module)
    equip(wrapper, model)
    optimizer: Any = accelerator.prepare(optimizer_of(optimizer_name, module.parameters()))
    samples = torch.randn(2 * STEPS, 6, 8, generator=torch.Generator().manual_seed(rank))
    return ended(functools.partial(_train, kind, accelerator, model, optimizer, samples), module)


def _train(kind: str, accelerator: Any, model: Any, optimizer: Any, samples: Tensor) -> None:
    inner: Any = model.module  # what accelerator.unwrap_model returns for PyTorch's wrapper
    called = {"the unwrapped model": inner, "a layer of the unwrapped model": inner[0]}.get(kind, model)
    for batch in samples:
        if kind == "steps in no_sync":
            with accelerator.no_sync(model):
                _step(accelerator, model, called, optimizer, batch)
        elif kind == "all passes in no_sync":
            with accelerator.no_sync(model):
                accelerator.backward(called(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        else:
            _step(accelerator, model, called, optimizer, batch)


def _step(accelerator: Any, model: Any, called: Any, optimizer: Any, batch: Tensor) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(called(batch).square().mean())
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------- Lightning

LIGHTNING = {
    "plain": RIGHT,
    "accumulated and clipped": RIGHT,
    "the inner module in training_step": RIGHT,  # Lightning calls training_step inside the wrapper's forward pass
    "manual": RIGHT,
    "a pass behind Lightning's back": RAISES,
    "all passes in no_sync": RAISES,
}


def under_lightning(rank: int) -> dict[str, Ended]:
    return {", ".join(case): _lightning(*case) for case in cover(LIGHTNING)}


def _lightning(kind: str, wrapper: str, optimizer_name: str) -> Ended:
    strategy = DDPCoreStrategy if "ddp_core" in wrapper else DDPStrategy
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1} if "accumulated" in kind else {}
    trainer = trainer_with(Equips(wrapper), strategy=strategy, max_epochs=1, **options)
    model = Network(kind, optimizer_name)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(96, 8, generator=generator)), 6)
    return ended(functools.partial(trainer.fit, model, loader), model)


class Equips(pl.Callback):
    """Attaches or registers what belongs to a wrapper, once there is one."""

    def __init__(self, wrapper: str) -> None:
        self.wrapper = wrapper

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.wrapper != CORE:
            equip(self.wrapper, trainer.strategy.model)


class Network(pl.LightningModule):
    """Trains in one of the ways of LIGHTNING."""

    def __init__(self, kind: str, optimizer_name: str) -> None:
        super().__init__()
        self.net, self.kind, self.optimizer_name = network(), kind, optimizer_name
        self.automatic_optimization = kind in ("plain", "accumulated and clipped", "the inner module in training_step")

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        if self.kind == "the inner module in training_step":
            inner: Any = self.trainer.strategy.model.module
            return inner.net(batch[0]).square().mean()  # type: ignore[no-any-return]  # 'Returning Any'
        if not self.automatic_optimization:
            self._step_manually(batch)
        return self.loss(batch)

    def _step_manually(self, batch: list[Tensor]) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if self.kind == "all passes in no_sync":
            with self.trainer.strategy.model.no_sync():
                self.manual_backward(self.loss(batch))
        else:
            self.manual_backward(self.loss(batch))
        if self.kind == "a pass behind Lightning's back":
            self.loss(batch).backward()
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.optimizer_name, self.parameters())
