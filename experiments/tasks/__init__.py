"""The tasks: their form, their loading by name, and the built-in ones."""

from .loading import TASKS, load_task
from .task import LoadedTask, Task

__all__ = ["LoadedTask", "TASKS", "Task", "load_task"]
