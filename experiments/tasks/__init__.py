"""The tasks: what a task is, how one is found by name, and those that are built in."""

from .loading import TASKS, load_task
from .task import LoadedTask, Task

__all__ = ["LoadedTask", "TASKS", "Task", "load_task"]
