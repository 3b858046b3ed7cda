"""The interface between the scheduler and whatever carries out its collectives."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from commhooks.communicators.collective import Collective


class Pending(Protocol):
    """A collective that has been started."""

    @property
    def result(self) -> Tensor:
        """The answer: the collective's own tensor for a dense all-reduce, a new one otherwise. Valid after `wait`."""
        ...

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when the result is in place.

        Raises `TimeoutError` when `timeout_seconds` pass first: nothing is lost, and `wait` may be called again. Raises
        `CollectiveError` when the collective failed.
        """
        ...


class Communicator(Protocol):
    """Start collectives.

    One thread does, in the same order on every rank. Several may be under way at once: the next bucket's may start
    before the last of this bucket is waited for.
    """

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """The number of workers."""
        ...

    def start(self, collective: Collective) -> Pending:
        """Start a collective, and return without waiting for it."""
        ...
