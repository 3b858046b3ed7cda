"""The machine and versions on which a result was measured."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from commhooks.experiments.devices import CPU, WHY_GLOO, in_words
from commhooks.units import counted


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    names = ("commhooks", "torch", "numpy", "scipy", "scikit-learn")
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def machine(device: torch.device = CPU, backend: str = "gloo") -> dict[str, str | int | float]:
    """Return the kind of machine, its load, and what trains on it, but nothing that identifies it."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "cores": cores(),
        "load": round(os.getloadavg()[0], 2),  # runnable processes, mean over the last minute
        "threads_per_rank": torch.get_num_threads(),
        "device": in_words(device),
        "backend": backend,
    }


def trained_on(machine: Mapping[str, Any], *, is_limited: bool) -> str:
    """Return a sentence about the device and the backend of a run, from its result's `machine`.

    Args:
        machine: Those of a result; earlier versions trained on the CPU alone.
        is_limited: The link's `is_limited`.

    """
    device = str(machine.get("device", "CPU"))
    backend = "NCCL" if machine.get("backend") == "nccl" else "Gloo"
    if device == "CPU":
        return f"It trains on the CPU, over {backend}."
    why = f": {WHY_GLOO}" if backend == "Gloo" and is_limited else ""
    return f"It trains on {device}, over {backend}{why}."


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(usable_processors())


def time_scale(ranks: int) -> float:
    """Return the seconds here that stand for one second, so that each of these ranks computes as fast as one core."""
    return max(1.0, ranks / cores())


class OtherPrograms:
    """The use of this process's processors by other programs, measured from construction on; on Linux only."""

    def __init__(self) -> None:
        self._began, self._own = time.perf_counter(), time.process_time()
        self._parent, self._busy = _seconds_of(os.getppid()), _busy_seconds()

    def own_seconds(self) -> float:
        """Return the seconds of CPU time that this process has used since construction."""
        return time.process_time() - self._own

    def used(self, ranks_seconds: float) -> float | None:
        """Return the mean number of processors that other programs have used; None if the system does not tell.

        Args:
            ranks_seconds: CPU seconds of all ranks on this machine since construction. Their parent process, which
                listens to them, is measured here and is not counted as another program.

        """
        parent, busy = _seconds_of(os.getppid()), _busy_seconds()
        if parent is None or busy is None or self._parent is None or self._busy is None:
            return None
        others = busy - self._busy - ranks_seconds - (parent - self._parent)
        return max(0.0, others / (time.perf_counter() - self._began))


def _busy_seconds() -> float | None:
    """Return the seconds in which this process's usable processors have not been idle, summed over them."""
    table, mine = Path("/proc/stat"), {f"cpu{number}" for number in usable_processors()}
    if not table.exists():
        return None
    rows = [line.split() for line in table.read_text(encoding="ascii").splitlines()]
    # user, nice, system, idle, iowait, irq, softirq, steal; the guests' times that follow are part of user's
    return sum(int(row[n]) for row in rows if row[0] in mine for n in (1, 2, 3, 6, 7, 8)) / os.sysconf("SC_CLK_TCK")


def _seconds_of(process: int) -> float | None:
    """Return the seconds of CPU time of a process, without its children's."""
    table = Path(f"/proc/{process}/stat")
    if not table.exists():
        return None
    user, system = table.read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]  # the name may hold spaces
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def usable_processors() -> frozenset[int]:
    """Return the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def processor_name() -> str:
    """Return the processor's model name, if Linux provides it."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load_average() -> float | None:
    """Return how many processes were runnable over the last minute, on average; None if the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def machine_in_words() -> str:
    """Return the kind of machine: nothing that identifies it."""
    return f"{counted(len(usable_processors()), 'core')}, {processor_name()}, {platform.system()} {platform.machine()}"
