"""Run a function on several ranks, quickly, and leave nothing behind.

`run_world` starts the ranks from a fork server that has torch imported already, so that a world of four costs a
fraction of a second. Every rank is a process of its own, which ends the way a script does (interpreter shut down, C++
destructors run) and whose exit code counts.
"""

from __future__ import annotations

from tests.world.launcher import Outcome, WorldError, run_world, run_world_outcomes

__all__ = ["Outcome", "WorldError", "run_world", "run_world_outcomes"]
