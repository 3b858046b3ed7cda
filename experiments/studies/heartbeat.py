"""Lines of progress where no terminal shows it."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

SECONDS = 60.0  # between two lines


class Heartbeat:
    """Prints lines, and knows when a minute has passed without one."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._printed = clock()

    @property
    def due(self) -> bool:
        """True if a minute has passed since the last line, or since the beginning."""
        return self._clock() - self._printed >= SECONDS

    def print(self, line: str) -> None:
        """Print a line of any kind."""
        self._printed = self._clock()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
