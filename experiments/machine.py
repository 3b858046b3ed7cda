"""The machine and versions on which a result was measured."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import torch

from commhooks.planning.place import processor_name, usable_processors


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    names = ("commhooks", "torch", "numpy", "scipy", "scikit-learn")
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def machine() -> dict[str, str | int | float]:
    """Return the kind of machine, and how busy it is; nothing that identifies it."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "cores": cores(),
        "load": round(os.getloadavg()[0], 2),  # runnable processes, mean over the last minute
        "threads_per_rank": torch.get_num_threads(),
        "backend": "gloo",
    }


def cores() -> int:
    """Return how many cores this process may use."""
    return len(usable_processors())


def dilation(ranks: int) -> float:
    """Return how many seconds here stand for one, so that each of these ranks has what one core computes."""
    return max(1.0, ranks / cores())
