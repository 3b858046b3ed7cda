"""PyTorch Lightning: `CompressGradients`, a callback, and `DDPCoreStrategy`, which trains with ddp_core's DDP.

A Trainer restores a checkpoint's callbacks first, then wraps the model, then calls `on_fit_start`. So the hook's state
from the checkpoint waits until there is a model to attach to.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from commhooks.errors import AttachError, CheckpointError, CommHooksError, SettingsError
from commhooks.exchange.feed import Channel
from commhooks.exchange.handle import Handle
from commhooks.integrations.common import (
    Compression,
    CompressionOptions,
    check_framework_has_no_hook,
    check_not_alone,
    require,
)
from commhooks.language.compressor import Compressor
from commhooks.unwrapping import is_ddp
from ddp_core import DistributedDataParallel

require("lightning", at_least="2.4")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402  # after the check
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

OWNER = "CompressGradients"
_ABSENT = "absent"
"""The key of the reason why a checkpoint has no state of the hook."""


class CompressGradients(Callback):
    """A callback that averages gradients with a compressor and keeps its state in the Trainer's checkpoints.

    `Trainer(strategy="ddp", callbacks=[CompressGradients("powersgd")])` is all that a script needs.

    - `compressor` and `options` are those of `commhooks.attach`; the gradient scaler is the Trainer's own.
    - `world_size`, `settings` and `missing` allow differences between a checkpoint and this run; see `LoadRules`.
      `missing="reset"` also accepts a checkpoint that was saved without this callback.
    - `log_every`: the number of optimizer steps between two writes of `Handle.metrics` to the Trainer's loggers.
      None: the Trainer's own interval (`log_every_n_steps`); 0: never write. `by_parameter` adds the metrics of every
      parameter.

    When training starts, it raises `AttachError` or `SettingsError` if the Trainer's strategy cannot work with a
    compressor, and `CheckpointError` if the checkpoint does not match the run. An optimizer step on gradients that
    bypassed the compressor raises `NotAveragedError`.
    """

    def __init__(
        self,
        compressor: Compressor | str,
        *,
        log_every: int | None = None,
        by_parameter: bool = False,
        **options: Unpack[CompressionOptions],
    ) -> None:
        self._compression = Compression(OWNER, compressor, **options)
        if log_every is not None and log_every < 0:
            raise SettingsError(f"{OWNER}(log_every={log_every}): log_every must be at least 0, or None.")
        self._log_every, self._by_parameter = log_every, by_parameter
        self._attachment: Handle[Channel] | None = None
        self._model: object = None
        self._loaded: dict[str, Any] | None = None
        self._last_logged = 0
        self._was_interrupted = False
        self._was_asked = False

    @property
    def attachment(self) -> Handle[Channel]:
        """The attachment of the latest `fit`, for its statistics; raises `AttachError` before the first."""
        if self._attachment is None:
            raise AttachError(f"{OWNER}: nothing is attached before trainer.fit().")
        return self._attachment

    @property
    def state_key(self) -> str:
        """The key of the hook's state among a checkpoint's callbacks; subclasses keep it."""
        return "commhooks.CompressGradients"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the last `fit`, even if an exception ended it; the Trainer restores a checkpoint afterwards."""
        if stage == "fit":
            self._compression.end()
            self._attachment = self._loaded = None
            self._was_interrupted = self._was_asked = False

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the hook's state from a checkpoint; raise `CheckpointError` if it has none."""
        if trainer.state.fn != "fit":
            return
        self._was_asked = True
        absent = {_ABSENT: f"it was saved without {OWNER}"}
        found = checkpoint["callbacks"].get(self.state_key, absent)
        if _ABSENT in found:
            if checkpoint["global_step"]:
                self._begin_without_state(found[_ABSENT])
        elif self._attachment is None:
            self._loaded = found
        else:  # a tuner, such as LearningRateFinder, returns to where it began
            self._compression.load_state_dict(found)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the model that the strategy has wrapped, and restore the checkpoint's state of the hook."""
        strategy = trainer.strategy
        check_not_alone(OWNER)
        if trainer.ckpt_path is not None and not self._was_asked:  # on_load_checkpoint was not called
            self._begin_without_state("it holds no callback's state")
        if not is_ddp(strategy.model):
            raise AttachError(
                f"{OWNER}: {type(strategy).__name__} does not train with a DistributedDataParallel (its model is "
                f'{type(strategy.model).__name__}); pass Trainer(strategy="ddp").'
            )
        check_framework_has_no_hook(OWNER, "DDPStrategy(ddp_comm_hook=...)", getattr(strategy, "_ddp_comm_hook", None))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._attachment = self._compression.begin(strategy.model, trainer.optimizers, scaler=scaler)
        if self._loaded is not None:
            self._compression.load_state_dict(self._loaded)
        # The attachment has only a weak reference to its model, but trainer.save_checkpoint() after fit() reads the
        # buckets of ddp_core's DDP. PyTorch's DDP has none to read, and should be freed when the Trainer drops it.
        self._model = strategy.model if hasattr(strategy.model, "bucket_plan") else None
        self._loaded, self._last_logged = None, trainer.global_step

    def _begin_without_state(self, why: str) -> None:
        """Raise `CheckpointError`, unless missing state is allowed."""
        if self._compression.rules.missing != "reset":
            raise CheckpointError(
                f"{OWNER}: the checkpoint has no state of the hook ({why}). Pass {OWNER}(..., "
                'missing="reset") to start from empty residuals; the run then differs from an uninterrupted one.'
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Log the metrics, every `log_every` steps."""
        step, every = trainer.global_step, self._log_every
        every = trainer.log_every_n_steps if every is None else every
        if every and step % every == 0 and step != self._last_logged and trainer.is_global_zero:
            self._last_logged = step
            for logger in trainer.loggers:
                self.attachment.log_to(logger, step, by_parameter=self._by_parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks on rank 0, which writes the checkpoint, and each other rank's own elsewhere.

        After an exception other ranks may be gone, so nothing is gathered: a checkpoint written then can be resumed
        only with `world_size="reset"` or, if the exception came in the middle of a step, with `missing="reset"`.
        """
        if self._attachment is None:
            return self._loaded or {}
        if not self._was_interrupted:
            return self._attachment.gathered(to=0)
        try:
            return self._attachment.state_dict()
        except CommHooksError as error:
            return {_ABSENT: f"it was saved after an exception: {error}"}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop gathering from other ranks: they may be gone."""
        self._was_interrupted = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach; `trainer.save_checkpoint()` still saves the hook's state."""
        self._compression.end()


class DDPCoreStrategy(DDPStrategy):
    """A strategy that trains with ddp_core's DistributedDataParallel, for `Trainer(strategy=DDPCoreStrategy())`.

    It takes the arguments of Lightning's `DDPStrategy` and passes on those of the DDP. Compress with
    `CompressGradients`: the argument `ddp_comm_hook` raises `SettingsError`.
    """

    model: Any

    def configure_ddp(self) -> None:
        """Wrap the model."""
        check_framework_has_no_hook(type(self).__name__, "ddp_comm_hook", self._ddp_comm_hook)
        self.model = self._setup_model(self.model)

    def _setup_model(self, model: LightningModule) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's `training_step` within the DDP's forward pass.

        With manual optimization it is called outside that forward pass, because its backward passes run before it
        returns; `backward` then does the work of the DDP's forward pass.
        """
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        self.model._before_forward(False)
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run a backward pass; with manual optimization, begin an iteration of the DDP first."""
        ddp = self.model
        if not self.lightning_module.automatic_optimization and ddp.require_backward_grad_sync:
            ddp._begin_iteration()
            ddp.reducer.leave_iteration()
            closure_loss = ddp._after_forward(closure_loss, True)
        result: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
        return result

    def teardown(self) -> None:
        """Unwrap the model."""
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        super().teardown()
