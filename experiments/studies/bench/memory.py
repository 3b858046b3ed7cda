"""The peak memory of a process while something runs: as the kernel counts it, C++ included (Linux)."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from experiments.studies.turns import forth_and_back, on_slowest, turns_of

KEEPS_FREED = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_THRESHOLD_": "4294967296"}
"""Variables with which a process keeps memory that it frees. Whole models' gradients, freed in every step, would
otherwise cost one contender or another page faults by chance; a hook's own temporaries should cost what they do."""

Step = Callable[[], object]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)
_STEPS = 4  # DDPs rebuild their buckets after the first
_LARGE = 64 * 1024  # bytes; blocks of at least this size return to the system as soon as they are freed
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # mallopt's names for them, in glibc's malloc.h


def is_countable() -> bool:
    """Return whether this system reports a process's peak memory, and can reset it."""
    return _CLEAR.exists() and "VmHWM" in _STATUS.read_text(encoding="utf-8")


def return_freed_memory() -> None:
    """Let this process give memory back when it is freed, so that one contender does not use what another left."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, _LARGE)
    libc.mallopt(_TRIM_THRESHOLD, _LARGE)


def growth_in_turns(contenders: Mapping[str, Callable[[], Step]], rounds: int) -> dict[str, list[float]]:
    """Return the bytes by which each contender's steps raise the peak memory of this process, in every round.

    A contender is a function that builds what is measured, and returns a function that takes a step.
    """
    turns = {name: partial(_growth_of, contender) for name, contender in contenders.items()}
    # The first round also allocates what everybody uses from then on.
    return turns_of(turns, rounds, warm_up=1, order=forth_and_back)


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
    return max(1.0, *on_slowest([grown])) * 1024


def _kilobytes(what: str) -> int:
    found = re.search(rf"^{what}:\s+(\d+) kB$", _STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, f"{_STATUS} has no line {what}"
    return int(found[1])
