"""What concerns the whole process: a check before any optimiser steps, and how Gloo's threads end with it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_core.feature import Feature
from ddp_core.features.delayed import DelayedGradients
from ddp_core.hooks import Pending
from ddp_core.reducer import Reducer

REST_SECONDS = 2.0  # how long the end of the process may wait for Gloo's threads


_watched: weakref.WeakSet[Reducer] = weakref.WeakSet()
_given_up: list[torch._C.Future[Any]] = []  # collectives of hooks, still under way when their reduction failed


class Watch(Feature):
    """Check a reducer before every optimiser step, and release its process group at exit."""

    def added(self, reducer: Reducer) -> None:
        """Begin."""
        _install()
        _watched.add(reducer)

    def on_failure(self, in_flight: Sequence[Pending | None]) -> None:
        """Record, until the end of the process, the futures that a hook's collectives have yet to complete."""
        _give_up(pending.future() for pending in in_flight if pending is not None and pending.group is not None)


def _give_up(futures: Iterable[torch._C.Future[Any] | None]) -> None:
    # not those made in Python: whatever completes them, no Gloo thread waits for it
    _given_up.extend(future for future in futures if future is not None and not isinstance(future, Future))
    _given_up[:] = [future for future in _given_up if not future.done()]


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)
    atexit.register(_before_exit, os.getpid())
    os.register_at_fork(after_in_child=_keep_groups)


def _keep_groups() -> None:
    """Never destroy a group in a forked process: Gloo would wait for threads that a fork does not have (tests/soak)."""
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Raise before an optimiser steps on gradients whose reduction was begun and never finished.

    PyTorch notices at the *next* forward pass; by then the optimiser has used gradients that differ between ranks.
    """
    busy = [reducer for reducer in _watched if reducer.is_unfinished]
    if busy and torch._C._current_graph_task_id() == -1:  # a step inside a backward pass is intended
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for reducer in busy:
            if not stepped.isdisjoint(map(id, all_parameters(reducer))):
                reducer.require_finished()


def _before_exit(process: int) -> None:
    """Wait until Gloo's threads have ended, or at least become idle, while the interpreter still runs.

    A thread that releases a finished collective needs the interpreter; if that is gone, the thread is killed inside C++
    code and the process aborts (tests/soak; PyTorch's own class does so in about 6 % of runs). A hook's collective that
    waits for a live peer that never comes cannot be ended at all: then the process exits immediately. None of this
    applies to a process forked from ``process``.
    """
    if os.getpid() != process:
        return
    reducers = list(_watched)
    if not any(reducer.is_unfinished for reducer in reducers):  # otherwise a group would wait for what may never end
        for reducer in reducers:
            _release_group(reducer)
        if reducers and dist.is_initialized() and dist.get_backend() == "gloo":
            dist.destroy_process_group()
    # The group itself may live on: functions of torch.distributed.nn, imported after it was made, have it as a default.
    deadline, quiet = time.monotonic() + REST_SECONDS, 0
    while quiet < 3 and time.monotonic() < deadline:
        time.sleep(0.005)  # whoever waits for the interpreter gets it now
        _give_up([])
        quiet = quiet + 1 if _gloo_threads_sleep() and not _given_up else 0
    if _given_up:
        print("ddp_core: what a communication hook began is still under way at exit; exiting.", file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)


def all_parameters(reducer: Reducer) -> list[Parameter]:
    """Return the parameters whose gradients are averaged, in buckets or delayed."""
    delayed = reducer.find(DelayedGradients)
    return reducer.layout.parameters + [parameter for _, parameter in (delayed.named if delayed else ())]


def _release_group(reducer: Reducer) -> None:
    """Drop the process group and everything that may hold it."""
    reducer.hook = None
    reducer.features.clear()
    vars(reducer).pop("process_group", None)


def _gloo_threads_sleep() -> bool:
    """Return True if no worker thread of Gloo is running or about to run (known only on Linux)."""
    stats = []
    for path in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended in the meantime
            stats.append(path.read_text())
    return all(stat.rpartition(") ")[2].startswith("S") for stat in stats if "(pt_gloo" in stat)
