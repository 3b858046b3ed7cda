"""What a result was measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("commhooks", "torch", "numpy", "scipy", "scikit-learn"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def machine() -> dict[str, str | int | float]:
    """Return what kind of machine this is, and how busy; nothing that names it."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "load": round(os.getloadavg()[0], 2),  # processes that wanted to run, mean over the last minute
        "threads_per_rank": torch.get_num_threads(),
        "backend": "gloo",
    }


def _processor() -> str:
    """Return the processor's own name where Linux tells it."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
