"""The way in which a run trains, and checks whether its hook can work there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from commhooks.exchange.optimizers import unsuited
from commhooks.experiments.hooks import make_hook
from commhooks.experiments.runs import RunSettings
from commhooks.experiments.specs import Spec, is_diloco
from commhooks.experiments.tasks import LoadedTask
from commhooks.experiments.training.diloco import settings_of
from commhooks.experiments.training.registration import DiLoCoHook, Registered, StockHook
from commhooks.experiments.training.sharded import ShardedHook, check_sharded
from commhooks.experiments.training.stock import check_stock, is_stock


def register(settings: RunSettings, task: LoadedTask, time_scale: float) -> Registered:
    """Wrap the task's model in its DDP, or shard it, and put the run's hook on it; DiLoCo takes the model itself."""
    kind: type[Registered] = StockHook if is_stock(settings.hook) else Registered
    if settings.is_sharded:
        kind = ShardedHook
    elif is_diloco(settings.hook):
        kind = DiLoCoHook
    return kind(settings, task, time_scale)


def check_hook(
    hook: Spec,
    parameters: Mapping[str, nn.Parameter] | None = None,
    *,
    is_sharded: bool = False,
    backend: str = "gloo",
) -> None:
    """Raise an error if there is no such hook, if a setting cannot work, or if it does not accept the parameters."""
    if is_stock(hook):
        check_stock(hook, backend)
    elif is_diloco(hook):
        settings_of(hook)["compressor"].check(parameters or {}, None)
    elif hook.has("gather") and not is_sharded:
        raise ValueError(f"hook {hook.label!r}: a DDP gathers no parameters, as sharded models do; leave out gather")
    else:
        make_hook(hook).check(parameters or {}, None)
    if is_sharded:
        check_sharded(hook)


def unsuited_hook(hook: Spec, optimizer: torch.optim.Optimizer, model: nn.Module) -> str | None:
    """Return the reason why a hook may diverge under an optimizer, and what to set; None if none is known."""
    if is_stock(hook) or is_diloco(hook):  # the optimizer of DiLoCo's ranks has their own gradients
        return None
    return unsuited(make_hook(hook), optimizer, model.parameters())
