"""Tasks: their definition, how one is found by name, and the built-in ones."""

from commhooks.experiments.tasks.loading import TASKS, load_task
from commhooks.experiments.tasks.task import LoadedTask, Task

__all__ = ["LoadedTask", "TASKS", "Task", "load_task"]
