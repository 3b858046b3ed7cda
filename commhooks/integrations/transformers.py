"""Compression in Hugging Face's `Trainer`: `CompressGradients`, a `TrainerCallback`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self, Unpack

from commhooks.communicators.ranks import Ranks
from commhooks.errors import AttachError, CheckpointError
from commhooks.exchange.feed import Channel
from commhooks.exchange.handle import Handle
from commhooks.integrations.common import Compression, CompressionOptions, require
from commhooks.language.compressor import Compressor
from commhooks.saving.rank_files import load_rank_files, save_rank_files

require("transformers", at_least="4.50", extra="torch")

from transformers import (  # noqa: E402  # after the check, whose error says what to install
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402

from commhooks.integrations.accelerate import check_accelerator  # noqa: E402  # the Trainer uses Accelerate

_OWNER = "CompressGradients"
_IN_FOLDER = "commhooks"
_OF_A_MOMENT = ("global_step", "epoch", "total_flos", "num_input_tokens_seen", "log_history")
"""Fields of a TrainerState that differ between checkpoints, and that a resumed run starts with."""


class CompressGradients(TrainerCallback):
    """A `TrainerCallback` that runs a compressor as the communication hook of a Trainer's model.

        CompressGradients("powersgd").add_to(trainer)

    It attaches when training begins and detaches when training ends. In between:

    - every checkpoint of the Trainer holds the hook's state, one file for each rank, and `resume_from_checkpoint`
      restores it. `world_size`, `settings` and `missing` allow differences: see `LoadRules`. To resume from a folder
      that is not in `output_dir`, pass it as `resume_from` too.
    - the optimizer is watched: a step on gradients that bypassed the compressor raises `NotAveragedError`.
    - whenever the Trainer logs a loss, it also logs `Handle.metrics` (`by_parameter=True`: each parameter's too),
      unless `log=False`.

    `options` are those of `attach`; `scaler` is the Trainer's own by default. With `save_only_model=True`, and in the
    trials of a hyperparameter search, checkpoints hold no state of the hook.
    """

    attachment: Handle[Channel] | None = None
    """The attachment of the latest training; it keeps its statistics afterwards."""

    def __init__(
        self,
        compressor: Compressor | str,
        *,
        resume_from: str | Path | None = None,
        log: bool = True,
        by_parameter: bool = False,
        **options: Unpack[CompressionOptions],
    ) -> None:
        self._compression = Compression(_OWNER, compressor, **options)
        self._resume_from = resume_from
        self._log = log
        self._by_parameter = by_parameter
        self._metrics: dict[str, float] = {}
        self._trainer: Trainer | None = None

    def add_to(self, trainer: Trainer) -> Self:
        """Add this callback to a Trainer, and return it.

        A Trainer passes its callbacks the module, but not the DistributedDataParallel around it, so this one needs the
        Trainer itself. Raises `AttachError` if the callback already has a Trainer, or the Trainer such a callback.
        """
        if not isinstance(trainer, Trainer):
            raise AttachError(f"{_OWNER}.add_to: expected a transformers.Trainer (got {type(trainer).__name__}).")
        others = [one for one in trainer.callback_handler.callbacks if isinstance(one, CompressGradients)]
        if self._trainer is not None or others:
            raise AttachError(f"{_OWNER}.add_to: a model has one hook; give each Trainer one callback of its own.")
        self._trainer = trainer
        trainer.add_callback(self)
        return self

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Raise `AttachError`: `Trainer(callbacks=[...])` does not pass the Trainer to this callback."""
        self._known_trainer()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Attach to the Trainer's DistributedDataParallel, and resume if the Trainer does."""
        trainer = self._known_trainer()
        self._compression.end()  # a run that ended with an error is still attached
        check_accelerator(_OWNER, trainer.accelerator)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # without Accelerate's wrapper
        self.attachment = self._compression.begin(trainer.model_wrapped, [optimizer], scaler=trainer.accelerator.scaler)
        if state.global_step > 0:
            ranks = Ranks(self.attachment.process_group)
            folder = ranks.each("find the checkpoint", lambda: self._resumed_folder(args, state))
            load_rank_files(folder, _IN_FOLDER, self.attachment, self._compression.rules)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Record the metrics of a step that will be logged: afterwards the Trainer drops the gradients."""
        step = state.global_step + 1
        is_logged = args.logging_strategy == "steps" and step % state.logging_steps == 0
        is_logged |= args.logging_first_step and step == 1
        self._metrics = self._taken() if is_logged else {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **others: Any,
    ) -> None:
        """Log the hook's metrics after a loss, through the Trainer and so to all its trackers."""
        if "loss" in (logs or {}) and (metrics := self._metrics or self._taken()):
            self._known_trainer().log(dict(metrics))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Write this rank's file into the checkpoint that the Trainer has just written."""
        if args.save_only_model or state.is_hyper_param_search or self.attachment is None:
            return
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        save_rank_files(folder, _IN_FOLDER, self.attachment)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Detach."""
        self._compression.end()

    def _known_trainer(self) -> Trainer:
        if self._trainer is None:
            raise AttachError(
                f"{_OWNER} does not know its Trainer; instead of Trainer(callbacks=[...]) or "
                f"trainer.add_callback(...), write {_OWNER}(...).add_to(trainer)."
            )
        return self._trainer

    def _taken(self) -> dict[str, float]:
        if not self._log or self.attachment is None:
            return {}
        return self.attachment.metrics(by_parameter=self._by_parameter)

    def _resumed_folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        """Return the checkpoint that the Trainer resumed from; callbacks are passed its content, but not its path."""
        usual = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        named = [Path(one) for one in (self._resume_from, args.resume_from_checkpoint) if isinstance(one, (str, Path))]
        for folder in [*named, usual]:
            if _holds(folder, state):
                return folder
        raise CheckpointError(
            f"the Trainer resumes at step {state.global_step}, but not from {' or '.join(map(str, [*named, usual]))}; "
            f"pass the folder that it does resume from as {_OWNER}(..., resume_from=...) too."
        )


def _holds(folder: Path, state: TrainerState) -> bool:
    """Return whether a folder is the checkpoint that the Trainer resumes from."""
    file = folder / TRAINER_STATE_NAME
    if not file.is_file():
        return False
    saved = TrainerState.load_from_json(str(file))
    # As text, because NaN, which a loss may be, does not equal itself.
    then, now = (json.dumps([getattr(one, name) for name in _OF_A_MOMENT]) for one in (saved, state))
    return then == now
