"""Run a function on several ranks, quickly, and leave nothing behind.

`run_world` starts the ranks from a fork server that has torch imported already, so that a world of four costs a
fraction of a second. Every rank is a process of its own, which ends the way a script does (interpreter shut down, C++
destructors run) and whose exit code counts. `on_ranks` makes a test of a function that runs on every rank.
"""

from __future__ import annotations

from tests.world.decorator import on_ranks
from tests.world.launcher import Outcome, WorldError, run_world, run_world_outcomes

__all__ = ["Outcome", "WorldError", "on_ranks", "run_world", "run_world_outcomes"]
