"""Ray Train: `compress` after `ray.train.torch.prepare_model`, and `save` before `ray.train.report`.

def train_loop(config):
    model = ray.train.torch.prepare_model(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment = compress(model, "powersgd", optimizers=[optimizer])
    ...
    save(attachment, folder)  # on every worker
    checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
    ray.train.report({"loss": loss} | attachment.metrics(), checkpoint=checkpoint)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from torch.nn import Module

from commhooks.errors import CheckpointError, SettingsError
from commhooks.exchange.feed import Channel
from commhooks.exchange.handle import Handle
from commhooks.integrations.common import Compression, CompressionOptions, require
from commhooks.language.compressor import Compressor
from commhooks.saving.files import read_tensors

require("ray", at_least="2.40", extra="train")

import ray.train  # noqa: E402  # after the check, whose error says what to install

STATE_FILE = "commhooks.pt"
"""The file in a Ray Train checkpoint that holds the state of all workers' hooks."""


def compress(
    model: Module,
    compressor: Compressor | str,
    *,
    optimizers: Iterable[object],
    checkpoint: ray.train.Checkpoint | Literal["latest"] | None = "latest",
    **options: Unpack[CompressionOptions],
) -> Handle[Channel]:
    """Average the gradients of a model that `ray.train.torch.prepare_model` returned with `compressor`.

    Call it inside the training loop, on every worker, and call `close()` on the result when the training is done.

    - `optimizers`, those that train the model, are watched: a step on gradients that bypassed the compressor raises
      `NotAveragedError`.
    - `checkpoint` holds the hook's state to resume from: "latest" is the result of `ray.train.get_checkpoint()`, None
      in a new run; None starts from zero. Loading the model and the optimizer is up to you.
    - `world_size`, `settings` and `missing` allow differences between checkpoint and run: see `LoadRules`.
    - All other arguments are those of `commhooks.attach`.

    Raises `CheckpointError` on every worker if the checkpoint holds no state of a hook, is damaged or does not match
    the run; `AttachError` if there is only one worker, or if the model is not wrapped in DistributedDataParallel.
    """
    compression = Compression("compress", compressor, **options)
    if checkpoint == "latest":
        checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        compression.load_state_dict(_read(checkpoint))
    return compression.begin(model, optimizers)


def save(attachment: Handle[Channel], folder: str | os.PathLike[str]) -> None:
    """Write the state of all workers' hooks into a folder, to become a Ray Train checkpoint; call it on every worker.

    The worker of rank 0 writes, and must be the one that passes the folder to `ray.train.report`; the other workers'
    `folder` is ignored.
    """
    state = attachment.gathered(to=0)
    if attachment.rank_and_world_size[0] == 0:
        torch.save(state, Path(folder) / STATE_FILE)


def _read(checkpoint: object) -> Mapping[str, Any] | CheckpointError:
    """Return the state in a checkpoint, or the error to raise on all workers."""
    if not isinstance(checkpoint, ray.train.Checkpoint):
        raise SettingsError(
            f'compress: checkpoint must be a ray.train.Checkpoint, "latest" or None (got {checkpoint!r}).'
        )
    try:
        with checkpoint.as_directory() as folder:
            if not (Path(folder) / STATE_FILE).exists():
                return CheckpointError(
                    f"{checkpoint.path} holds no {STATE_FILE}: it is from a run without compression, or from one that "
                    "did not call commhooks.integrations.ray.save. Pass checkpoint=None to begin with an empty state."
                )
            return read_tensors(Path(folder) / STATE_FILE)
    except Exception as error:  # whatever storage and damaged files cause: the other workers are waiting
        return CheckpointError(f"{checkpoint.path}/{STATE_FILE} cannot be read ({type(error).__name__}: {error}).")
