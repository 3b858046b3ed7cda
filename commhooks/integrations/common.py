"""The common part of integrations: a compressor that waits for its model, and state that waits for its attachment."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import Any, Unpack, cast

import torch.distributed as dist
from torch.nn import Module

from commhooks.errors import AttachError, CheckpointError, SettingsError
from commhooks.exchange.checks import read_text
from commhooks.exchange.feed import Channel
from commhooks.exchange.handle import Handle
from commhooks.exchange.options import Options, settings_of
from commhooks.hooks.attach import attach
from commhooks.language.compressor import Compressor, check_compressor
from commhooks.saving.rules import LoadOptions, LoadRules
from commhooks.state.loss_scale import Scaler


class CompressionOptions(Options, LoadOptions, total=False):
    """The arguments of `attach`, and the allowed differences between a checkpoint and this run, as in `LoadRules`."""


class Compression:
    """A compressor and the options to attach it with, kept from before the model exists until training has ended.

    `owner` is its name in errors.
    """

    def __init__(self, owner: str, compressor: Compressor | str, **options: Unpack[CompressionOptions]) -> None:
        self.allowed: LoadOptions
        self.rules: LoadRules
        given, self.allowed, self.rules = split_options(owner, options, CompressionOptions)
        self.owner = owner
        self.compressor: Compressor
        self.options: Options
        self.compressor, self.options = read_text(owner, compressor, cast(Options, given))
        check_compressor(owner, self.compressor)
        settings_of("attach", self.options, owner)
        self.attachment: Handle[Channel] | None = None
        self._loaded: Mapping[str, Any] | CheckpointError | None = None

    def begin(
        self, model: object, optimizers: Iterable[object] = (), *, scaler: Scaler | None = None
    ) -> Handle[Channel]:
        """Attach to a model, load the state that waits for it, and watch its optimizers; call it on every rank.

        `scaler` is the framework's own, used unless another one was passed at construction.
        """
        if self.attachment is not None:
            raise AttachError(f"{self.owner}: it is attached to a model already; use one for each model.")
        check_not_alone(self.owner)
        if not isinstance(model, Module):
            raise AttachError(f"{self.owner}: expected the model as the framework wrapped it (got {model!r}).")
        options = self.options if "scaler" in self.options else Options(**self.options, scaler=scaler)
        attachment = attach(model, self.compressor, **options)
        try:
            attachment.watch(*optimizers)
            if self._loaded is not None:
                attachment.load_state_dict(self._loaded, **self.allowed)
        except Exception:
            attachment.close()
            raise
        self.attachment, self._loaded = attachment, None
        return attachment

    def end(self) -> None:
        """Detach, if attached."""
        attachment, self.attachment = self.attachment, None
        if attachment is not None:
            attachment.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks on rank 0, which writes the checkpoint, and each other rank's own elsewhere."""
        if self.attachment is None:
            raise CheckpointError(f"{self.owner}: nothing is attached, so there is no state to save.")
        return self.attachment.gathered(to=0)

    def load_state_dict(self, state: Mapping[str, Any] | CheckpointError) -> None:
        """Load rank 0's `state_dict`, now or as soon as something is attached."""
        if self.attachment is None:
            self._loaded = state
        else:
            self.attachment.load_state_dict(state, **self.allowed)


def split_options(owner: str, options: Mapping[str, Any], known: type) -> tuple[dict[str, Any], LoadOptions, LoadRules]:
    """Return the arguments to pass on, those that allow differences of checkpoints, and their rules.

    Raises `SettingsError` for an argument that is not among the annotations of `known`.
    """
    if unknown := options.keys() - known.__annotations__.keys():
        raise SettingsError(
            f"{owner}: unknown argument {', '.join(sorted(unknown))}; settings of a compressor go to the "
            'compressor, as in make_compressor("powersgd", rank=4).'
        )
    allowed: Any = {name: options[name] for name in LoadOptions.__annotations__ if name in options}
    return {name: given for name, given in options.items() if name not in allowed}, allowed, LoadRules(**allowed)


def check_not_alone(owner: str) -> None:
    """Raise `AttachError` if this is the only process: there is nothing to exchange, and frameworks wrap no model."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise AttachError(
            f"{owner}: this run has one process, so no gradients are exchanged and there is nothing to compress. "
            "Launch it on several (torchrun --nproc-per-node 2 script.py), or leave the compression out."
        )


def require(distribution: str, *, at_least: str, extra: str = "") -> None:
    """Raise `ImportError` if a framework is not installed, or is older than this integration supports.

    `extra` is the framework's own extra that its training needs.
    """
    advice = f"pip install '{distribution}{f'[{extra}]' if extra else ''}>={at_least}'"
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"this integration of commhooks needs {distribution}: {advice}") from None
    if _numbers(version) < _numbers(at_least):
        raise ImportError(
            f"this integration of commhooks needs {distribution} {at_least} or newer (found {version}): {advice}"
        )


def check_framework_has_no_hook(owner: str, argument: str, hook: object) -> None:
    """Raise `SettingsError` if the framework's own argument for a hook is set too."""
    if hook is not None:
        raise SettingsError(
            f"{owner}: {argument} is set too (to {hook!r}). A model takes one hook; leave that argument out."
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 2.6.6 of "2.6.6.post1+cpu"."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
