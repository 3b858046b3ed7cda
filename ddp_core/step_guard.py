"""Stop an optimiser from stepping on gradients whose reduction was begun and never finished.

PyTorch notices an unfinished reduction at the *next* forward pass; by then the optimiser has used gradients that
differ between ranks. This notices in the same step, before a parameter changes.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from ddp_core.reducer import Reducer

_watched: weakref.WeakSet[Reducer] = weakref.WeakSet()


def watch(reducer: Reducer) -> None:
    """Check ``reducer`` before every step of every optimiser that holds one of its parameters."""
    _install()
    _watched.add(reducer)


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    busy = [reducer for reducer in _watched if reducer.in_progress]
    if busy and torch._C._current_graph_task_id() == -1:  # a step inside a backward pass knows what it does
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for reducer in busy:
            if not stepped.isdisjoint(map(id, reducer.parameters)):
                reducer.require_finished()
