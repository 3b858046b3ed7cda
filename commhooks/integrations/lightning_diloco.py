"""DiLoCo in PyTorch Lightning: `TrainWithDiLoCo`, a callback, and `DiLoCoStrategy`, which wraps no DDP.

Between rounds every rank has its own model, optimizer and gradient scaler, so every rank writes a checkpoint: rank 0 at
the path that Lightning gives, and rank r beside it, at <path>-rank<r>.pt. Each is a whole Lightning checkpoint, whose
"state_dict" holds the outer copies; the callback's state in it holds the rank's own state.

A Trainer reads a checkpoint and restores its callbacks, sets the strategy up, calls `on_fit_start`, and then restores
optimizers, the gradient scaler and its loops.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from commhooks.communicators.private_group import WrapCommunicator
from commhooks.communicators.ranks import Ranks
from commhooks.devices import generator_states, set_generator_states
from commhooks.diloco.cutting import Arrangement
from commhooks.diloco.diloco import DiLoCo
from commhooks.diloco.inner import OptimizerState
from commhooks.diloco.outer import Outer
from commhooks.diloco.starting import trained
from commhooks.errors import AttachError, CheckpointError, SettingsError
from commhooks.integrations.common import check_not_alone, require, split_options
from commhooks.language.compressor import Compressor
from commhooks.saving.parts import shared_part
from commhooks.saving.rules import LoadOptions
from commhooks.state.table import ResidualStorage
from commhooks.unwrapping import bare, kept_buffers
from ddp_core.guard import NotAveragedError

require("lightning", at_least="2.4")

from lightning.fabric.utilities.cloud_io import get_filesystem  # noqa: E402  # after the check
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

OWNER, STRATEGY = "TrainWithDiLoCo", "DiLoCoStrategy"
STATE_KEY = "commhooks.TrainWithDiLoCo"
_ABSENT = "absent"
"""The key of the reason why a checkpoint has no state of DiLoCo."""


class DiLoCoOptions(LoadOptions, total=False):
    """The arguments of `DiLoCo` that a callback passes on, and the fields of `LoadRules`."""

    outer: Outer | str
    fragments: int | Sequence[str | Sequence[str]]
    arrangement: Arrangement
    delay: int
    mixing: float
    on_host: bool
    weighted: bool
    optimizer_state: OptimizerState
    hook_timeout: float | None
    wrap_communicator: WrapCommunicator | None
    residuals: ResidualStorage


class TrainWithDiLoCo(Callback):
    """A callback that trains with DiLoCo, evaluates the outer copies, and keeps all state in the Trainer's checkpoints.

    `Trainer(strategy=DiLoCoStrategy(), callbacks=[TrainWithDiLoCo(every=30, compressor="int4")])` is all that a script
    needs. Steps are optimizer steps, whatever `accumulate_grad_batches` is, including steps that a gradient scaler
    skips.

    - `every`, `compressor` and `options` are those of `commhooks.DiLoCo`.
    - `world_size`, `settings` and `missing` allow differences between a checkpoint and this run; see `LoadRules`.
      `world_size` may be "refuse", "keep" or "reset"; `missing="reset"` also accepts a checkpoint that was saved
      without this callback, such as one of data-parallel training.

    Validation during `fit` sees the outer copies, and so does every use of the module after `fit`, on every rank.

    When training starts, it raises `AttachError` or `SettingsError` for another strategy or settings that `DiLoCo`
    rejects, and `CheckpointError` if the checkpoint does not match the run. A `fit` that ends without any round since
    training began raises `NotAveragedError`.
    """

    def __init__(
        self, *, every: int, compressor: Compressor | str = "all-reduce", **options: Unpack[DiLoCoOptions]
    ) -> None:
        given, self._allowed, self._rules = split_options(OWNER, options, DiLoCoOptions)
        if self._rules.spreads:
            raise SettingsError(
                f"{OWNER}(world_size={self._rules.world_size!r}): with DiLoCo each rank reads its own file and no "
                "other; pass 'keep' to let each rank keep its residual, or 'reset' to start them from zero."
            )
        self._settings: dict[str, Any] = {"every": every, "compressor": compressor, **given}
        self._diloco: DiLoCo | None = None
        self._evaluating = contextlib.ExitStack()
        self._forget()

    def _forget(self) -> None:
        """Forget the last `fit`, even if an exception ended it."""
        self._evaluating.close()
        if self._diloco is not None:
            self._diloco.close()
        self._diloco = None
        self._module: Any = None
        self._own: dict[str, Tensor] | None = None
        """This rank's own parameters and buffers, once the module holds the outer copies after `fit`."""
        self._loaded: dict[str, Any] | None = None
        self._begun_at = 0
        self._was_asked = self._was_interrupted = False

    @property
    def diloco(self) -> DiLoCo:
        """The `DiLoCo` of the latest `fit`, for its statistics; raises `AttachError` before the first."""
        if self._diloco is None:
            raise AttachError(f"{OWNER}: there is no DiLoCo before trainer.fit().")
        return self._diloco

    @property
    def state_key(self) -> str:
        """The key of the state among a checkpoint's callbacks; subclasses keep it."""
        return STATE_KEY

    # --- beginning ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the last `fit`; the Trainer restores a checkpoint afterwards."""
        if stage == "fit":
            self._forget()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the state from a checkpoint."""
        if trainer.state.fn != "fit":
            return
        self._was_asked = True
        found = checkpoint["callbacks"].get(STATE_KEY, {_ABSENT: f"it was saved without {OWNER}"})
        if self._diloco is None:
            self._loaded = found if _ABSENT not in found or checkpoint["global_step"] else None
        else:  # a tuner, such as LearningRateFinder, returns to where it began
            self._load(self._diloco, pl_module, found)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the `DiLoCo`, and restore its state from a checkpoint; the Trainer restores the optimizer next."""
        strategy = trainer.strategy
        check_not_alone(OWNER)
        if not isinstance(strategy, DiLoCoStrategy):
            raise AttachError(
                f"{OWNER}: {type(strategy).__name__} averages gradients in every step, or does not share data among "
                f"ranks; pass Trainer(strategy={STRATEGY}())."
            )
        if len(trainer.optimizers) != 1:
            raise SettingsError(
                f"{OWNER}: DiLoCo takes one optimizer for all parameters (configure_optimizers returned "
                f"{len(trainer.optimizers)})."
            )
        state = self._compared(is_resumed=trainer.ckpt_path is not None)
        self._module, self._loaded = pl_module, None
        self._diloco = strategy.diloco = DiLoCo(pl_module, trainer.optimizers[0], **self._settings)
        if state is not None:
            self._load(self._diloco, pl_module, state)

    def _compared(self, *, is_resumed: bool) -> dict[str, Any] | None:
        """Return the state to begin with; raise `CheckpointError` unless all ranks' are of one save or may be missing.

        It raises on every rank, since a rank that failed alone would leave the others waiting.
        """
        state = self._loaded
        if state is None and is_resumed and not self._was_asked:  # on_load_checkpoint was not called
            state = {_ABSENT: "it holds no callback's state"}
        own = "no checkpoint" if state is None else f"none: {state[_ABSENT]}" if _ABSENT in state else state["save"]
        told = Ranks(None).gather("compare the checkpoints", lambda: own)
        if len(set(told)) > 1:
            raise CheckpointError(
                f"{OWNER}: ranks begin with checkpoints of different saves ("
                + "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(told))
                + "). Pass the same trainer.fit(ckpt_path=...) on every rank, which must see the file that it wrote. "
                "Remove the file of a rank that was not there when rank 0's was written. After a save that was cut "
                "short, resume from another checkpoint."
            )
        if state is None or _ABSENT not in state:
            return state
        if self._rules.missing != "reset":
            raise CheckpointError(
                f"{OWNER}: the checkpoint has no state of DiLoCo ({state[_ABSENT]}). Pass {OWNER}(..., "
                'missing="reset") to begin DiLoCo at the checkpoint\'s model.'
            )
        return None

    def _load(self, diloco: DiLoCo, module: LightningModule, state: dict[str, Any]) -> None:
        """Restore DiLoCo and, if the number of ranks is unchanged, this rank's own state; if one rank fails, all do."""
        ranks = Ranks(diloco.process_group)
        of_diloco = ranks.each("take DiLoCo's state", lambda: _state_for(ranks, state))
        if state["world_size"] > ranks.world_size and ranks.rank == 0 and self._rules.world_size == "keep":
            left = ", ".join(map(str, range(ranks.world_size, state["world_size"])))
            warnings.warn(f"commhooks: what the ranks that have left ({left}) had not sent is lost.", stacklevel=2)
        diloco.load_state_dict(of_diloco, **self._allowed)
        if state["world_size"] == ranks.world_size:  # otherwise all ranks begin at the outer copies
            with torch.no_grad():
                for name, tensor in _own_tensors(module).items():
                    tensor.copy_(state["own"][name])
            torch.set_rng_state(state["generators"]["cpu"])
            set_generator_states(state["generators"])

    # --- in between ---------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the step at which training begins."""
        self._begun_at = trainer.global_step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module the outer copies; after `fit`, it has them already."""
        if self._diloco is not None and self._own is None:
            self._evaluating.enter_context(self._diloco.outer_parameters())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore this rank's own parameters in the module, before a checkpoint is saved."""
        self._evaluating.close()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; every rank writes a checkpoint of its own.

        After an exception other ranks may be gone, so the checkpoint has none.
        """
        if self._diloco is None:
            return self._loaded or {_ABSENT: "it was saved before DiLoCo had begun"}
        if self._was_interrupted:
            return {_ABSENT: "it was saved after an exception"}
        ranks = Ranks(self._diloco.process_group)
        return {
            "save": ranks.first("name the save", lambda: uuid.uuid4().hex),
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            "own": _own_tensors(self._module) if self._own is None else self._own,
            "generators": {"cpu": torch.get_rng_state(), **generator_states()},
            "diloco": self._diloco.state_dict(),
        }

    # --- ending -------------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the module's own parameters if an evaluation failed, and save no more state: ranks may be gone."""
        self._was_interrupted = True
        self._evaluating.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise `NotAveragedError` if no round took place; give the module the outer copies, and end all exchanges.

        `trainer.save_checkpoint()` still saves this rank's own state.
        """
        diloco = self.diloco
        counts = diloco.statistics()
        if trainer.global_step > self._begun_at and not counts.rounds and not trainer.fast_dev_run:
            raise NotAveragedError(
                f"{OWNER}: training ended after {trainer.global_step} steps of the optimizer, {counts.steps} of them "
                f"counted, without a round, so each rank trained alone. Rounds take place every "
                f"{diloco.schedule.every} steps: train longer, or choose a smaller every."
            )
        self._end(diloco, trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do the same after a `fit` that had nothing left to train, in which `on_train_end` is not called."""
        if self._own is None:
            self._end(self.diloco, trainer)

    def _end(self, diloco: DiLoCo, trainer: Trainer) -> None:
        self._own = {name: tensor.clone() for name, tensor in _own_tensors(self._module).items()}
        with diloco.outer_parameters():
            shared = [parameter.detach().clone() for parameter in diloco.trained_parameters]
        with torch.no_grad():
            torch._foreach_copy_(diloco.trained_parameters, shared)
        diloco.close()
        trainer.strategy.diloco = None


class DiLoCoStrategy(DDPStrategy):
    """A strategy that starts ranks and distributes data like `strategy="ddp"`, without wrapping the module.

    Use it as `Trainer(strategy=DiLoCoStrategy(), callbacks=[TrainWithDiLoCo(every=30)])`; without that callback it
    raises `AttachError`, as each rank would train alone. It takes the arguments of Lightning's `DDPStrategy`. Arguments
    of the DistributedDataParallel raise `SettingsError`, as does `Trainer(sync_batchnorm=True)`.
    """

    diloco: DiLoCo | None = None
    """The `DiLoCo` of the training in progress."""

    def __init__(self, **options: Any) -> None:
        allowed = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
        allowed |= {"process_group_backend", "timeout", "start_method"}
        if others := options.keys() - allowed:
            raise SettingsError(
                f"{STRATEGY}({', '.join(sorted(others))}=...): there is no DistributedDataParallel that could take it."
            )
        super().__init__(**options)

    def setup(self, trainer: Trainer) -> None:
        """Set up the module and its optimizers, and let Lightning communicate in no step."""
        if trainer.state.fn == "fit":
            if self._layer_sync is not None:
                raise SettingsError(
                    f"{STRATEGY}: sync_batchnorm=True would communicate in every forward pass; DiLoCo averages the "
                    "statistics of batch norms once a round."
                )
            if not any(isinstance(callback, TrainWithDiLoCo) for callback in trainer.callbacks):
                raise AttachError(f"{STRATEGY}: each rank would train alone; add {OWNER}(...) to Trainer(callbacks=).")
            # Lightning broadcasts in every batch whether rank 0 received SIGTERM. That message would wait in line
            # behind a fragment that is under way (test_lightning_communicates_in_rounds_alone). A rank that ends tells
            # the others in the next round.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _do_nothing
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take a step of the optimizer, and count it."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.diloco is not None:
            self.diloco.step()
        return output

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state_dict, for checkpoints; during `fit`, with the outer copies for parameters."""
        if self.diloco is not None:
            return self.diloco.model_state()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    # --- checkpoints, of which every rank has its own -----------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write this rank's checkpoint; rank 0 alone writes if there is no state of DiLoCo.

        Raises `CheckpointError` on every rank if any of them cannot write.
        """
        state = checkpoint.get("callbacks", {}).get(STATE_KEY, {_ABSENT: "only weights are saved"})
        if _ABSENT in state:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path, ranks = _path_of(self.global_rank, filepath), Ranks(None)
        save = functools.partial(self.checkpoint_io.save_checkpoint, checkpoint, path, storage_options=storage_options)
        ranks.each("save the checkpoint", save)
        left = ranks.world_size
        while ranks.rank == 0 and get_filesystem(filepath).exists(old := _path_of(left, filepath)):
            self.checkpoint_io.remove_checkpoint(old)  # a run with more ranks wrote it
            left += 1

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read this rank's checkpoint, or rank 0's if it has none."""
        is_link = Path(checkpoint_path).is_symlink()  # with ModelCheckpoint(save_last="link")
        own = _path_of(self.global_rank, Path(checkpoint_path).resolve() if is_link else checkpoint_path)
        path = own if get_filesystem(own).exists(own) else checkpoint_path
        read: dict[str, Any] = super().load_checkpoint(path, weights_only)
        return read

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove this rank's checkpoint."""
        self.checkpoint_io.remove_checkpoint(_path_of(self.global_rank, filepath))


def _path_of(rank: int, filepath: Any) -> str:
    return f"{filepath}-rank{rank}.pt" if rank else str(filepath)


def _state_for(ranks: Ranks, state: dict[str, Any]) -> dict[str, Any]:
    """Return DiLoCo's state for this rank from the callback's, which may be another rank's."""
    of_diloco: dict[str, Any] = state["diloco"]
    if state["rank"] == ranks.rank:
        return of_diloco
    if state["world_size"] == ranks.world_size:
        raise CheckpointError(
            f"this rank read the checkpoint of rank {state['rank']}, as there is none of its own beside it "
            f"(<path>-rank{ranks.rank}.pt); every rank must see the file that it wrote."
        )
    return shared_part(of_diloco)  # this rank has joined


def _own_tensors(module: LightningModule) -> dict[str, Tensor]:
    """Return the tensors of a module that differ between ranks, by name: the trained parameters and the buffers."""
    inner = bare(module)
    buffers = kept_buffers(inner, with_ignored=True)
    return {name: parameter.detach() for name, parameter in trained(inner).items()} | buffers


def _do_nothing() -> None: ...
