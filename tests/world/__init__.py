"""Run a function on several ranks, quickly, and leave nothing behind.

`run_world` starts the ranks from a fork server that has torch imported already, so that a world of four costs a
fraction of a second. Every rank is a process of its own. In the first world of a test file, and where a test asks for
it, ranks end the way a script does, and their exit codes count: the interpreter is shut down and, on rank 0, C++
destructors run. Elsewhere they end at once, as a checked exit is three quarters of what a world costs.
WORLD_EXITS=checked checks all. `on_ranks` makes a test of a function that runs on every rank. A rank that is to come
too late calls `stay_away`, until those that give it up `tell`.
"""

from __future__ import annotations

from tests.world.decorator import on_ranks
from tests.world.launcher import Outcome, WorldError, run_world, run_world_outcomes
from tests.world.presence import stay_away, tell

__all__ = ["Outcome", "WorldError", "on_ranks", "run_world", "run_world_outcomes", "stay_away", "tell"]
