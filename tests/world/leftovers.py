"""What a test leaves in its process that a program which goes on would feel: threads, groups, hooks, defaults."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.modules import module
from torch.optim import optimizer

OF_LIBRARIES = ("tqdm_monitor",)  # one for a process, which tqdm never ends
PATIENCE_SECONDS = 2.0  # a thread that was told to end may still be ending
KEPT = ("ddp_core.features.watch", "ddp_core.guard.suspicion", "ddp_core.guard.following")
"""The files whose hooks of all optimizers and modules are made once in a process, by design."""
DEFAULTS: Mapping[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "gradients": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "threads of mathematics": torch.get_num_threads,
    "autocast": lambda: torch.is_autocast_enabled("cpu"),
    "saved tensors": lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
    "hooks": lambda: sorted(_hooks()),
}


def defaults() -> dict[str, Any]:
    """Return what holds for the whole process."""
    return {name: read() for name, read in DEFAULTS.items()}


def left_since(before: Mapping[str, Any]) -> list[str]:
    """Return what is there that was not when `defaults` was called, each thing in a line, once the group is destroyed.

    Threads and groups are given a moment to end.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (running := _threads() + _groups()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    now = defaults()
    changed = [f"{name}: {before[name]} became {now[name]}" for name in DEFAULTS if before[name] != now[name]]
    return running + changed


def _hooks() -> Iterator[str]:
    """Yield the names of the hooks of all modules and all optimizers."""
    for where in (module, optimizer):
        tables = [
            table for name, table in vars(where).items() if name.startswith("_global_") and isinstance(table, dict)
        ]
        for hook in itertools.chain.from_iterable(table.values() for table in tables):
            if callable(hook) and getattr(hook, "__module__", "") not in KEPT:
                yield getattr(hook, "__qualname__", repr(hook))


def _threads() -> list[str]:
    others = (one.name for one in threading.enumerate() if one is not threading.main_thread())
    # the library's own end with a line, or with the process, which tests of exits check
    return [f"thread {name}" for name in others if name not in OF_LIBRARIES and not name.startswith("commhooks")]


def _groups() -> list[str]:
    return [f"group {name}" for name in distributed_c10d._world.pg_names.values()] if dist.is_available() else []
