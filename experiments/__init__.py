"""Training runs with several hooks, side by side: runs are described as data, and the command line is `commhooks`.

A checkout has this package as `experiments`, an installation as `commhooks.experiments`, so that no top-level name is
taken. Its modules import each other relatively, and are the same under both names.
"""

from .tasks import Task, load_task

__all__ = ["Task", "load_task"]
