"""The interface between the scheduler and whatever runs its collectives."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from commhooks.communicators.collective import Collective


class Pending(Protocol):
    """A collective that has been started."""

    @property
    def result(self) -> Tensor:
        """The answer: the collective's own tensor for a dense all-reduce, otherwise a new one. Valid after `wait`."""
        ...

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when the result is ready.

        Raises `TimeoutError` if `timeout_seconds` pass first: nothing is lost, and `wait` may be called again. Raises
        `CollectiveError` if the collective failed.
        """
        ...


class Communicator(Protocol):
    """The interface for starting collectives.

    A single thread calls it, in the same order on every rank. Several collectives may be under way at once: the next
    bucket's may start before this bucket's last one has finished.
    """

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """The number of workers."""
        ...

    def start(self, collective: Collective) -> Pending:
        """Start a collective, and return without waiting for it."""
        ...
