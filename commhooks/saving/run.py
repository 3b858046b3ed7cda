"""A training run as a checkpoint sees it: the parts that are saved, as plain data."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from commhooks.communicators.ranks import Ranks
from commhooks.devices import generator_states
from commhooks.errors import CheckpointError
from commhooks.saving.form import LAYOUT
from commhooks.saving.parts import Part, own_part, shared_part
from commhooks.saving.rules import LoadRules
from commhooks.saving.saved import Saved
from commhooks.unwrapping import bare, unwrapped
from commhooks.version import VERSION

_PLAIN = (int, float, complex, str, bytes, bytearray, bool, type(None), torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, torch.Size)
_MAPPINGS = (dict, OrderedDict, Counter)


class Stateful(Protocol):
    """Anything with a `state_dict`: a `torch.optim.Optimizer`, `torch.amp.GradScaler`, learning-rate scheduler, ..."""

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...  # noqa: D102


class HookState(Protocol):
    """A `Handle`, such as a `PowerSGDState`, or a `DiLoCo`."""

    @property
    def keeps_own_model(self) -> bool:
        """True if every rank has its own model and optimizer's state: then it is an `OwnModels`."""
        ...

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group whose ranks average together."""
        ...

    @property
    def rank_and_world_size(self) -> tuple[int, int]: ...  # noqa: D102
    def snapshot(self) -> Saved: ...  # noqa: D102
    def differences(self, saved: Saved, rules: LoadRules) -> list[str]: ...  # noqa: D102
    def restore(self, saved: Saved | CheckpointError, rules: LoadRules) -> None: ...  # noqa: D102


class OwnModels(HookState, Protocol):
    """A `DiLoCo` or another averager of the ranks' own models."""

    def model_state(self) -> dict[str, Any]:
        """Return a state_dict of the model that all ranks share."""
        ...


def of_own_models(hooks: HookState | None) -> TypeGuard[OwnModels]:
    """Return whether the ranks' models and optimizers differ, so that each saves its own."""
    return hooks is not None and hooks.keeps_own_model


@dataclasses.dataclass(frozen=True)
class Run:
    """The objects that `save_checkpoint` saves and `load_checkpoint` loads into."""

    ddp: Module
    optimizer: Stateful | None
    scaler: Stateful | None
    hooks: HookState | None

    @property
    def model(self) -> Module:
        """The bare module inside the DDP and all other wrappers, whose state_dict is saved."""
        return bare(self.ddp)

    @property
    def beside(self) -> dict[str, Stateful]:
        """The optimizer and the gradient scaler, if they are given, by name."""
        named = {"optimizer": self.optimizer, "scaler": self.scaler}
        return {name: one for name, one in named.items() if one is not None}

    def ranks(self) -> Ranks:
        """Return the ranks of the model's process group or, if ranks have their own models, of the averager's.

        Raises `CheckpointError` for a sharded model: rank 0's shards would be saved as the whole.
        """
        sharded = next((name for name, one in self.model.named_parameters() if hasattr(one, "to_local")), None)
        if sharded is not None:
            raise CheckpointError(
                f"every rank has a shard of {sharded!r} only; save with torch.distributed.checkpoint.save, the hooks' "
                "state_dict() beside the model's, and load that with commhooks.load_distributed."
            )
        if of_own_models(self.hooks):
            return Ranks(self.hooks.process_group)
        return Ranks(getattr(unwrapped(self.ddp), "process_group", None))

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are in the model's state_dict; others may be caches, of any shape."""
        kept = self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in kept}

    def consolidate_optimizer(self) -> None:
        """Collect on rank 0 the state of an optimizer that is sharded over the ranks; every rank calls this.

        The `state_dict` of PyTorch's ZeroRedundancyOptimizer returns the state that it collected last, however old.
        """
        if is_sharded(self.optimizer):
            self.optimizer.consolidate_state_dict(to=0)

    def own_part(self, hooks: Part | None, step: int, save: str) -> dict[str, Any]:
        """Return the state that each rank saves separately: its residuals, buffers and random number generators.

        If ranks have their own models, it includes the states of the rank's model, optimizer and scaler. `save` names
        the save, so that files of different saves cannot be mixed up.
        """
        generators = {"cpu": torch.get_rng_state(), **generator_states()}
        part = _head(save, step) | {"generators": generators, "buffers": self.buffers()}
        if of_own_models(self.hooks):
            part["model"] = self.model.state_dict()
            part |= {name: one.state_dict() for name, one in self.beside.items()}
            _require_plain("", part)
        return part if hooks is None else part | {"hooks": own_part(hooks)}

    def shared_part(
        self, hooks: Part | None, step: int, save: str, world_size: int, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the state that is the same on every rank; raise `CheckpointError` if it is not plain data."""
        part = _head(save, step) | {"world_size": world_size}
        part["model"] = self.hooks.model_state() if of_own_models(self.hooks) else self.model.state_dict()
        part |= {name: one.state_dict() for name, one in self.beside.items()}
        part["optimizer_class"] = optimizer_class(self.optimizer)
        if hooks is not None:
            part["hooks"] = shared_part(hooks)
        part["extra"] = dict(extra)
        _require_plain("", part)
        return part


def _head(save: str, step: int) -> dict[str, Any]:
    """Return what every file of a checkpoint says of itself."""
    return {"layout": LAYOUT, "commhooks": VERSION, "save": save, "step": step}


class ShardedOptimizer(Stateful, Protocol):
    """A `ZeroRedundancyOptimizer`, or an optimizer with the same interface."""

    optim: object
    """The optimizer of this rank's shard."""

    def consolidate_state_dict(self, to: int = ...) -> None: ...  # noqa: D102


def is_sharded(optimizer: Stateful | None) -> TypeGuard[ShardedOptimizer]:
    """Return whether the optimizer's state is sharded over the ranks."""
    return hasattr(optimizer, "consolidate_state_dict")


def optimizer_class(optimizer: Stateful | None) -> str:
    """Return the name of an optimizer's class; for a sharded one, of the optimizer of its shards.

    A sharded optimizer saves the same state as an unsharded one, so a run may change between the two.
    """
    return type(optimizer.optim if is_sharded(optimizer) else optimizer).__name__


def _require_plain(where: str, value: object) -> None:
    """Raise `CheckpointError` for data that `torch.load` would reject by default: at load time it would be too late."""
    plain = True
    if type(value) in _MAPPINGS:
        for key, held in value.items():  # type: ignore[attr-defined]  # "object" has no attribute "items"
            _require_plain(f"a key of {where}", key)
            _require_plain(f"{where}[{key!r}]", held)
    elif type(value) in _SEQUENCES:
        for number, held in enumerate(value):  # type: ignore[arg-type]  # "object" is not Iterable
            _require_plain(f"{where}[{number}]", held)
    elif isinstance(value, Tensor):
        plain = type(value) in (Tensor, torch.nn.Parameter, *torch.serialization.get_safe_globals())
    else:
        plain = type(value) in _PLAIN  # not isinstance: numpy's float64 is a float, and torch.load rejects it
    if not plain:
        raise CheckpointError(
            f"{where} must be plain data, which torch.load accepts by default: tensors, numbers, strings, lists, "
            f"dictionaries (got {type(value).__module__}.{type(value).__qualname__})."
        )
