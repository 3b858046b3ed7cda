"""How much memory a process takes at most while something runs: as the kernel counts it, C++ included (Linux)."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

Step = Callable[[], object]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)
_STEPS = 4  # DDPs rebuild their buckets after the first
_LARGE = 64 * 1024  # bytes; blocks of at least this size return to the system as soon as they are freed
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # mallopt's names for them, in glibc's malloc.h


def is_countable() -> bool:
    """Return whether this system tells a process how much memory it took, and lets it start anew."""
    return _CLEAR.exists() and "VmHWM" in _STATUS.read_text(encoding="utf-8")


def return_freed_memory() -> None:
    """Let this process give memory back when it is freed, so that one contender does not use what another left."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _LARGE)
    libc.mallopt(_TRIM_THRESHOLD, _LARGE)


def growth_in_turns(contenders: Mapping[str, Callable[[], Step]], rounds: int) -> dict[str, list[float]]:
    """Return by how many bytes each contender's steps raise the memory of this process at most, in every round.

    A contender is a function that builds what is measured, and returns a function that takes a step.
    """
    names = list(contenders)
    growth: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(1 + rounds):  # the first round also allocates what everybody uses from then on
        for name in names if turn % 2 else names[::-1]:
            growth[name].append(_growth_of(contenders[name]))
    return {name: taken[1:] for name, taken in growth.items()}


def _growth_of(contender: Callable[[], Step]) -> float:
    gc.collect()
    dist.barrier()
    before = _kilobytes("VmRSS")
    _CLEAR.write_text(_RESET_PEAK, encoding="utf-8")
    step = contender()
    for _ in range(_STEPS):
        step()
    grown = _kilobytes("VmHWM") - before
    dist.barrier()
    together = torch.tensor([grown], dtype=torch.float64)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    return max(1.0, together.item()) * 1024


def _kilobytes(what: str) -> int:
    found = re.search(rf"^{what}:\s+(\d+) kB$", _STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, f"{_STATUS} has no line {what}"
    return int(found[1])
