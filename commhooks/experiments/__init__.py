"""Training runs with several hooks, side by side: runs are described as data, and the command line is `commhooks`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commhooks.experiments.api import compare
    from commhooks.experiments.runs import RunResult, RunSettings
    from commhooks.experiments.sweeps.store import load_table
    from commhooks.experiments.tasks import Task, load_task

__all__ = ["RunResult", "RunSettings", "Task", "compare", "load_table", "load_task"]

_HOMES = {"RunResult": ".runs", "RunSettings": ".runs", "compare": ".api", "load_table": ".sweeps.store"}
_HOMES |= {"Task": ".tasks", "load_task": ".tasks"}


def __getattr__(name: str) -> Any:
    """Import a name from its module when it is first used: importing the package costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
