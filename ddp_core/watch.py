"""What watches over all reducers of the process: before an optimiser steps, and when the process ends."""

from __future__ import annotations

import atexit
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from ddp_core.reducer import Reducer

_watched: weakref.WeakSet[Reducer] = weakref.WeakSet()


def watch(reducer: Reducer) -> None:
    """Let ``reducer`` be checked before every optimiser step, and let go of its process group at exit."""
    _install()
    _watched.add(reducer)


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)
    atexit.register(_before_exit)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Stop an optimiser from stepping on gradients whose reduction was begun and never finished.

    PyTorch notices at the *next* forward pass; by then the optimiser has used gradients that differ between ranks.
    """
    busy = [reducer for reducer in _watched if reducer.in_progress]
    if busy and torch._C._current_graph_task_id() == -1:  # a step inside a backward pass knows what it does
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for reducer in busy:
            if not stepped.isdisjoint(map(id, reducer.parameters)):
                reducer.require_finished()


def _before_exit() -> None:
    """End Gloo's threads while the interpreter stands.

    A thread that drops the last reference to a tensor needs the interpreter; if that is gone, the thread is killed
    inside C++ code and the process aborts (tests/soak). A group's threads end with its last reference.
    """
    reducers = list(_watched)
    if any(reducer.in_progress for reducer in reducers):
        return  # the group would wait for collectives of an interrupted step, which may never end
    for reducer in reducers:
        reducer.hook = reducer.join_work = None
        vars(reducer).pop("process_group", None)
    if reducers and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
