"""The available tasks: each is one file, and one line in the table below."""

from __future__ import annotations

from collections.abc import Callable

from .digits import Digits
from .gpt import Gpt
from .task import Batch, Evaluation, Task

_TASKS: dict[str, Callable[[str], Task]] = {"digits": Digits.of_size, "gpt": Gpt.of_size}

__all__ = ["Batch", "Evaluation", "Task", "make_task", "task_names"]


def task_names() -> list[str]:
    """Return the names of all tasks, sorted."""
    return sorted(_TASKS)


def make_task(name: str, size: str = "medium") -> Task:
    """Return the task of this name in this size ('tiny', 'small', 'medium' or 'large').

    Raises:
        ValueError: There is no task or size of this name.

    """
    if name not in _TASKS:
        raise ValueError(f"task {name!r} is not known: expected one of {', '.join(task_names())}")
    return _TASKS[name](size)
