"""Tasks: their definition, how one is found by name, and the built-in ones."""

from .loading import TASKS, load_task
from .task import LoadedTask, Task

__all__ = ["LoadedTask", "TASKS", "Task", "load_task"]
