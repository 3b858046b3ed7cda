"""What an engine hands its buckets to, and the one failure that ends all lanes of a line."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol

from commhooks.errors import AttachError, CollectiveError, CommHooksError, CompressorError
from commhooks.scheduling.lanes import Lane, Lanes
from commhooks.scheduling.policy import Wait
from commhooks.scheduling.task import BucketTask

SLICE_SECONDS = 0.2
"""How often a waiting rank checks whether another has reported a failure, or whether it should stop."""


class StopOrderError(CommHooksError):
    """Raised to end a line because it was told to, not because something failed."""


class Waits(Protocol):
    """Whatever waits for the line: a task, or a place in its queue."""

    def fail(self, error: Exception) -> None:
        """Complete its future with the error."""
        ...


class Board(Protocol):
    """The means by which ranks tell each other why one failed. No method waits for the store."""

    def post(self, cause: str) -> None:
        """Tell the other ranks."""
        ...

    def failure(self) -> str | None:
        """Return what some rank reported, if known; raise `CommHooksError` if the store is gone."""
        ...

    def close(self) -> None:
        """Close the board; called after all other methods."""
        ...


class Scheduler(ABC):
    """Runs the bucket tasks of a line's lanes, and completes their futures. The first failure ends all lanes."""

    def __init__(self, rank: int, wait: Wait, board: Board | None = None) -> None:
        self.error: CommHooksError | None = None
        """The first failure."""
        self.rank = rank
        self.board = board
        self._lanes = Lanes(rank, wait)
        self._keeping = threading.Lock()
        self._listened = 0.0

    @abstractmethod
    def submit(self, lane: Lane, task: BucketTask) -> None:
        """Take a task; its future is eventually completed with the mean or with an error."""

    @abstractmethod
    def agree(self, lane: Lane, fingerprint: str, caller: str) -> None:
        """Return once every rank has passed the same fingerprint; raise `AttachError` or the error that prevented it.

        Called by every rank between the same two steps; `caller` says which call, and when, to ranks that do not make
        it. The statistics do not count it.
        """

    @abstractmethod
    def drain(self, lane: Lane, caller: str) -> None:
        """Return when everything handed in has ended, whether or not it succeeded."""

    def failure(self, lane: Lane) -> CommHooksError | None:
        """Return what ended the work, or kept the lane from opening; None while it continues or if it was stopped."""
        was_stopped = self.error is not None and isinstance(self.error.__cause__, StopOrderError)
        return lane.refusal if self.error is None or was_stopped else self.error

    def listen(self) -> None:
        """Raise `CollectiveError` if another rank has reported a failure, which is looked up every `SLICE_SECONDS`."""
        now = time.monotonic()
        if self.board is None or now - self._listened < SLICE_SECONDS:
            return
        self._listened = now
        cause = self.board.failure()
        if cause is not None:
            raise CollectiveError(f"another rank failed: {cause}")

    def place_of(self, lane: Lane, item: Waits) -> str:
        """Name rank, lane, step and bucket, for messages; of what is not a task, the rank."""
        return self._lanes.where(lane, item) if isinstance(item, BucketTask) else f"rank {self.rank}"

    def _here(self, otherwise: str = "") -> str:
        """Return the place of what is being worked on, to which errors are attributed; `otherwise` if it is nothing."""
        touching = self._lanes.touching()
        return self._lanes.where(*touching) if touching is not None else otherwise or f"rank {self.rank}"

    def _turn_away(self, lane: Lane, item: Waits) -> None:
        """Fail what is handed in after a failure or a stop."""
        earlier = self.error or lane.refusal or CollectiveError("the attachment was stopped")
        place = self.place_of(lane, item)
        item.fail(type(earlier)(f"{place}: not started, because of an earlier failure: {earlier}"))

    def _keep(self, error: BaseException, where: str, why: str = "") -> CommHooksError:
        """Return the failure that ends the line, of the kind of its cause: this one, or the one that came first."""
        kind: type[CommHooksError] = CompressorError
        if isinstance(error, AttachError):
            kind = AttachError
        elif isinstance(error, (CollectiveError, StopOrderError)):
            kind = CollectiveError
        failure = kind(f"{where}: {why or f'{type(error).__name__}: {error}'}")
        failure.__cause__ = error
        with self._keeping:
            if self.error is None:
                self.error = failure
            return self.error

    @staticmethod
    def _fail_all(waiting: Iterable[Waits], failure: CommHooksError) -> None:
        """Fail everything that waits; a compressor sees the cause at its `yield`, so that it can clean up."""
        for one in waiting:
            if isinstance(one, BucketTask):
                one.throw(failure.__cause__ or failure)
            one.fail(failure)
