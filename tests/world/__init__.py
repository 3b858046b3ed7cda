"""Run a function on several ranks, quickly, and leave nothing behind.

`run_world` starts the ranks from a fork server that has torch imported already, so that a world of four costs a
fraction of a second. Every rank is a process of its own, which ends the way a script does and whose exit code counts:
the interpreter is shut down and, on rank 0, C++ destructors run. Those destroy torch's own registries, for more than
half of what a rank costs, so one rank of each world has to do. `on_ranks` makes a test of a function that runs on every
rank.
"""

from __future__ import annotations

from tests.world.decorator import on_ranks
from tests.world.launcher import Outcome, WorldError, run_world, run_world_outcomes

__all__ = ["Outcome", "WorldError", "on_ranks", "run_world", "run_world_outcomes"]
