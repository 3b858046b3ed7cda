"""The times in which collectives were waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from commhooks.communicators import Collective, Communicator, Pending

Interval = tuple[float, float]
"""The begin and the end of an interval, in seconds of one clock."""


class WaitClock:
    """A record of the times in which collectives were waited for; `around` attaches it to a communicator."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._intervals: list[Interval] = []

    def around(self, communicator: Communicator) -> Communicator:
        """Return the communicator with every wait recorded here."""
        return _ClockedCommunicator(communicator, self)

    def note(self, begin: float, end: float) -> None:
        """Add one wait; called by the thread that waits."""
        self._intervals.append((begin, end))

    def take(self) -> list[Interval]:
        """Return the waits recorded since the last call, with overlaps merged."""
        intervals, self._intervals = self._intervals, []
        return merged(intervals)


class _ClockedCommunicator:
    def __init__(self, inner: Communicator, waits: WaitClock) -> None:
        self._inner = inner
        self._waits = waits

    @property
    def world_size(self) -> int:
        return self._inner.world_size

    @property
    def rank(self) -> int:
        return self._inner.rank

    def start(self, collective: Collective) -> Pending:
        return _ClockedPending(self._inner.start(collective), self._waits)


class _ClockedPending:
    def __init__(self, inner: Pending, waits: WaitClock) -> None:
        self._inner = inner
        self._waits = waits

    @property
    def result(self) -> Tensor:
        return self._inner.result

    def wait(self, timeout_seconds: float | None = None) -> None:
        begin = self._waits.clock()
        try:
            self._inner.wait(timeout_seconds)
        finally:
            self._waits.note(begin, self._waits.clock())


def merged(intervals: list[Interval]) -> list[Interval]:
    """Return the same moments as disjoint intervals in order."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def overlap(disjoint: list[Interval], window: Interval) -> float:
    """Return the seconds of the window that lie in the intervals."""
    return sum(max(0.0, min(end, window[1]) - max(begin, window[0])) for begin, end in disjoint)
