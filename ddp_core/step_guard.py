"""Stop an optimiser from stepping on gradients whose reduction was begun and never finished.

PyTorch notices an unfinished reduction at the *next* forward pass; by then the optimiser has used gradients that
differ between ranks. This notices in the same step, before a parameter changes.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from ddp_core.reducer import Reducer

_watched: weakref.WeakSet[Reducer] = weakref.WeakSet()
_installed: list[Any] = []


def watch(reducer: Reducer) -> None:
    """Check ``reducer`` before every step of every optimiser that holds one of its parameters."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))
    _watched.add(reducer)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if torch._C._current_graph_task_id() != -1:
        return  # an optimiser that steps inside the backward pass knows what it does
    for reducer in list(_watched):
        if reducer.in_progress:
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if any(id(parameter) in stepped for parameter in reducer.parameters):
                reducer.require_finished()
