"""What the tests of the Lightning integration run on every rank."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import commhooks
from commhooks.integrations.lightning import CompressGradients, DDPCoreStrategy
from tests.frameworks.launch import raised

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

EPOCHS, STEPS_AN_EPOCH = 4, 3
"""12 steps; a checkpoint is written after every epoch, and runs are resumed from the second, after 6 steps."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16, accumulated, clipped": {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "fp16": {"plugins": lambda: MixedPrecision("16-mixed", "cpu")},
    "compiled": {"compiled": True},
    "manual": {"manual": True},
    "ddp_core": {"strategy": DDPCoreStrategy, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


class Network(pl.LightningModule):
    def __init__(self, manual: bool = False, forgets_manual_backward: bool = False) -> None:
        super().__init__()
        self.lr = 0.05
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.automatic_optimization = not (manual or forgets_manual_backward)
        self.backward_of: Callable[[Tensor], None] = (
            torch.Tensor.backward if forgets_manual_backward else self.manual_backward
        )

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            for _ in range(2):  # as the two networks of a GAN do, in turns
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.backward_of(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
                optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class BugError(Exception):
    """What ends a run in the middle."""


class InThirdEpoch(pl.Callback):
    """Calls something after the second batch of the third epoch."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: pl.Trainer, *others: Any) -> None:
        if trainer.current_epoch == 2 and others[-1] == 1:
            self.act()


def kill_this_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_a_bug() -> None:
    raise BugError


@functools.cache  # Lightning removes the variable again
def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def compress(**options: Any) -> CompressGradients:
    return CompressGradients(commhooks.make_compressor("powersgd", rank=1), **options)


def trainer_with(*callbacks: pl.Callback, strategy: Callable[[], Any] = DDPStrategy, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy=strategy(),
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        **{"logger": False, "max_epochs": EPOCHS} | options,
    )


def loader_for(trainer: pl.Trainer, samples: int = 8) -> DataLoader[Any]:
    """Return so much data that every epoch has the same number of steps, with the number of each sample."""
    generator = torch.Generator().manual_seed(0)
    size = STEPS_AN_EPOCH * trainer.accumulate_grad_batches * samples
    inputs, labels = torch.randn(size, 32, generator=generator), torch.randint(8, (size,), generator=generator)
    data = TensorDataset(inputs, labels, torch.arange(size))
    return DataLoader(data, samples // trainer.world_size, shuffle=True, drop_last=True)


def fit(
    trainer: pl.Trainer, *, ckpt_path: Path | None = None, compiled: bool = False, **options: bool
) -> pl.LightningModule:
    torch.manual_seed(0)
    model = Network(**options)
    trained: Any = torch.compile(model, backend="eager") if compiled else model
    trainer.fit(trained, loader_for(trainer), ckpt_path=ckpt_path, weights_only=True)
    return model


def fit_as(
    setting: str, *callbacks: pl.Callback, ckpt_path: Path | None = None
) -> tuple[pl.Trainer, pl.LightningModule]:
    options = dict(SETTINGS[setting])
    own = {name: options.pop(name) for name in ("manual", "compiled") if name in options}
    if "plugins" in options:
        options["plugins"] = options["plugins"]()
    trainer = trainer_with(*callbacks, **options)
    return trainer, fit(trainer, ckpt_path=ckpt_path, **own)


def digest(value: object) -> str:
    """Return a text that is the same for the same tensors, bit for bit."""
    if isinstance(value, Mapping):
        value = [(key, digest(entry)) for key, entry in sorted(value.items())]
    elif isinstance(value, list):
        value = [digest(entry) for entry in value]
    elif isinstance(value, Tensor):
        value = f"{value.dtype} {tuple(value.shape)} {value.detach().contiguous().view(-1).view(torch.uint8).tolist()}"
    return hashlib.blake2b(repr(value).encode()).hexdigest()


def outcome(trainer: pl.Trainer, model: nn.Module, compress: CompressGradients) -> dict[str, str]:
    """Return what must be the same whether a run was interrupted or not."""
    state = compress.attachment.gathered()
    return {
        "steps": str(trainer.global_step),
        "parameters": digest(model.state_dict()),
        "momentum": digest(trainer.optimizers[0].state_dict()["state"]),
        "steps of the hook": str(state["step"]),
        "residuals": digest(state["local"]),
        "bases": digest(state["replicated"]),
    }


def checkpoints_in(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)


def uninterrupted(rank: int) -> dict[str, dict[str, str]]:
    found = {}
    for setting in SETTINGS:
        callback = compress()
        trainer, model = fit_as(setting, callback)
        found[setting] = outcome(trainer, model, callback)
        assert callback.attachment.statistics().ratio > 10, setting
        steps = EPOCHS * STEPS_AN_EPOCH * (2 if SETTINGS[setting].get("manual") else 1)
        assert callback.attachment.steps == trainer.global_step == steps, "one collective step for each optimizer step"
    return found


def interrupted(rank: int, folder: str) -> None:
    """Stop every run in its third epoch: all by an exception, and the last one by a kill."""
    *others, last = SETTINGS
    for setting in others:
        callbacks = compress(), checkpoints_in(Path(folder, setting)), InThirdEpoch(raise_a_bug)
        assert raised(functools.partial(fit_as, setting, *callbacks)) == "BugError: ", setting
    fit_as(last, compress(), checkpoints_in(Path(folder, last)), InThirdEpoch(kill_this_rank))


def resumed(rank: int, folder: str) -> dict[str, dict[str, str]]:
    found = {}
    for setting in SETTINGS:
        callback = compress()
        trainer, model = fit_as(setting, callback, ckpt_path=Path(folder, setting, "epoch=1.ckpt"))
        found[setting] = outcome(trainer, model, callback)
    checkpoint = Path(folder, "plain", "epoch=1.ckpt")
    found |= {"without its state": without_state(checkpoint, rank)}
    return found


def without_state(checkpoint: Path, rank: int) -> dict[str, str]:
    """Resume from a checkpoint without the hook's state, which is allowed if asked for; and then from one with it."""
    stripped = checkpoint.with_name(f"stripped-{rank}.ckpt")
    contents = torch.load(checkpoint, weights_only=True)
    for of_what, told in ((contents["callbacks"], ""), (contents, " (it holds no callback's state)")):
        of_what.pop("callbacks" if told else "commhooks.CompressGradients")
        torch.save(contents, stripped)
        refused = raised(lambda: fit(trainer_with(compress()), ckpt_path=stripped))
        assert f"CheckpointError: CompressGradients: the checkpoint has no state of the hook{told}" in refused, refused
    callback = compress(missing="reset")
    trainer = trainer_with(callback)
    return outcome(trainer, fit(trainer, ckpt_path=stripped), callback)


def run_script(rank: int, script: str, argument: str, folder: str) -> None:
    """Run a script as torchrun would, without the time that it takes to import a framework."""
    os.chdir(folder)
    sys.argv = [script, argument]
    runpy.run_path(script, run_name="__main__")


class Local(DDPStrategy):
    """A strategy that leaves the model as it is."""

    def configure_ddp(self) -> None: ...


def hook_that_raises(state: object, bucket: Any) -> Any:
    raise BugError("the hook was called")


def refusals(rank: int, folder: str) -> dict[str, str]:
    """Return the error of everything that cannot work."""
    own = {"ddp_comm_hook": commhooks.allreduce_hook}
    saved = Path(folder, "saved.ckpt")
    trainer = trainer_with(compress())
    fit(trainer)
    trainer.save_checkpoint(saved)
    return {
        "own argument alone": raised(
            lambda: fit(trainer_with(strategy=lambda: DDPStrategy(ddp_comm_hook=hook_that_raises)))
        ),
        "own argument": raised(lambda: fit(trainer_with(compress(), strategy=lambda: DDPStrategy(**own)))),
        "own argument, ddp_core": raised(lambda: fit(trainer_with(strategy=lambda: DDPCoreStrategy(**own)))),
        "not DDP": raised(lambda: fit(trainer_with(compress(), strategy=Local))),
        "did not run": raised(lambda: fit(trainer_with(compress()), forgets_manual_backward=True)),
        "other settings": raised(lambda: fit(trainer_with(CompressGradients("int8"), max_epochs=5), ckpt_path=saved)),
        "before fit": raised(lambda: compress().attachment),
    }


def on_other_ranks(rank: int, folder: str) -> dict[str, str]:
    """Resume what two ranks have saved."""
    saved = Path(folder, "saved.ckpt")
    refused = raised(lambda: fit(trainer_with(compress(), max_epochs=5), ckpt_path=saved))
    callback = compress(world_size="spread")
    trainer = trainer_with(callback, max_epochs=5)
    fit(trainer, ckpt_path=saved)
    assert callback.attachment.steps == trainer.global_step == 16, "12 of two ranks, and 4 of three"
    return {"refused": refused}


class Recorder(Logger):
    """A logger that keeps what it is given."""

    name, version = "recorder", 0

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step is not None and any(name.startswith("commhooks/") for name in metrics):
            self.metrics[step] = metrics

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def around_a_fit(rank: int, folder: str) -> None:
    """Log, fit twice, save after a fit and after an exception, search for a learning rate."""
    recorder, callback = Recorder(), compress(log_every=5, by_parameter=True)
    trainer = trainer_with(callback, logger=recorder)
    model = fit(trainer)
    assert list(recorder.metrics) == ([5, 10] if rank == 0 else [])
    if rank == 0:
        assert recorder.metrics[10]["commhooks/compression_ratio"] > 10
        assert "commhooks/bytes_sent_total/net.0.weight" in recorder.metrics[10]
    ended = callback.attachment.gathered()
    trainer.save_checkpoint(Path(folder, "after.ckpt"))
    saved = torch.load(Path(folder, "after.ckpt"), weights_only=True)["callbacks"]["commhooks.CompressGradients"]
    assert digest(saved["local"]) == digest(ended["local"])
    assert saved["local"].keys() == {"rank0", "rank1"}
    trainer.fit_loop.max_epochs = 2 * EPOCHS
    trainer.fit(model, loader_for(trainer))  # with a new optimizer, which begins from nothing, as the hook does
    assert (trainer.global_step, callback.attachment.steps) == (24, 12)

    # It trains for 5 steps and goes back to where it began, the hook's state too.
    finder = LearningRateFinder(num_training_steps=5)
    fit(trainer := trainer_with(callback, finder, logger=True, default_root_dir=folder))
    assert callback.attachment.gathered()["step"] == trainer.global_step == 12

    on_exception = OnExceptionCheckpoint(folder, "exception")
    caught = raised(lambda: fit(trainer_with(compress(), InThirdEpoch(raise_a_bug), on_exception)))
    assert caught == "BugError: ", caught
    refused = raised(lambda: fit(trainer_with(compress()), ckpt_path=Path(folder, "exception.ckpt")))
    assert "holds the residuals of rank 0 and this is rank 1" in refused, refused


def under_the_older_name(rank: int) -> int:
    """Train with the package `pytorch_lightning`, which the package `lightning` brings along."""
    import pytorch_lightning
    from pytorch_lightning.demos.boring_classes import BoringModel

    callback, quiet = compress(), dict.fromkeys(["logger", "enable_checkpointing", "enable_model_summary"], False)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback], max_steps=3, **quiet
    )
    trainer.fit(BoringModel())
    return callback.attachment.steps
