"""The scheduler that engines hand their buckets to, and the one failure that ends all channels of a connection."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol

from commhooks.communicators.failure_store import FailureStore
from commhooks.errors import AttachError, CollectiveError, CommHooksError, CompressorError
from commhooks.scheduling.channels import ConnectionChannel, ConnectionChannels
from commhooks.scheduling.policy import Wait
from commhooks.scheduling.task import BucketTask

SLICE_SECONDS = 0.2
"""Seconds between a waiting rank's checks for another rank's failure, or for an order to stop."""


class StopOrderError(CommHooksError):
    """An order to end a connection, without a failure."""


class Waits(Protocol):
    """An item that waits for the connection: a task, or a place in its queue."""

    def fail(self, error: Exception) -> None:
        """Complete its future with the error."""
        ...


class Scheduler(ABC):
    """Runs the bucket tasks of a connection's channels, and completes futures. The first failure ends all channels."""

    def __init__(
        self, rank: int, wait: Wait, failures: FailureStore | None = None, look_around: Callable[[], None] | None = None
    ) -> None:
        self.error: CommHooksError | None = None
        """The first failure."""
        self.rank = rank
        self.failures = failures
        self._channels = ConnectionChannels(rank, wait, look_around)
        self._keeping = threading.Lock()
        self._listened = 0.0

    @abstractmethod
    def submit(self, channel: ConnectionChannel, task: BucketTask) -> None:
        """Take a task; its future is eventually completed with the mean or with an error."""

    @abstractmethod
    def agree(self, channel: ConnectionChannel, fingerprint: str, caller: str) -> None:
        """Return once every rank has passed the same fingerprint; raise `AttachError` or the error that prevented it.

        Every rank must call it between the same two steps; `caller` names the call for ranks that do not make it. The
        statistics do not count it.
        """

    @abstractmethod
    def drain(self, channel: ConnectionChannel, caller: str) -> None:
        """Wait until every task handed in has ended, successfully or not."""

    def failure(self, channel: ConnectionChannel) -> CommHooksError | None:
        """Return the error that ended the connection or kept the channel closed; None if it was stopped."""
        was_stopped = self.error is not None and isinstance(self.error.__cause__, StopOrderError)
        return channel.refusal if self.error is None or was_stopped else self.error

    def listen(self) -> None:
        """Raise `CollectiveError` if another rank has reported a failure, checking every `SLICE_SECONDS`."""
        now = time.monotonic()
        if self.failures is None or now - self._listened < SLICE_SECONDS:
            return
        self._listened = now
        cause = self.failures.failure()
        if cause is not None:
            raise CollectiveError(f"another rank failed: {cause}")

    def place_of(self, channel: ConnectionChannel, item: Waits) -> str:
        """Name a task's rank, channel, step and bucket, for messages; for other items only the rank."""
        return self._channels.where(channel, item) if isinstance(item, BucketTask) else f"rank {self.rank}"

    def _here(self, otherwise: str = "") -> str:
        """Return the place of the task in progress, to which errors are attributed; `otherwise` if there is none."""
        touching = self._channels.touching()
        return self._channels.where(*touching) if touching is not None else otherwise or f"rank {self.rank}"

    def _turn_away(self, channel: ConnectionChannel, item: Waits) -> None:
        """Fail an item that is handed in after a failure or a stop."""
        earlier = self.error or channel.refusal or CollectiveError("the attachment was stopped")
        place = self.place_of(channel, item)
        item.fail(type(earlier)(f"{place}: not started, because of an earlier failure: {earlier}"))

    def _keep(self, error: BaseException, where: str, why: str = "") -> CommHooksError:
        """Return the failure that ends the connection, this one or an earlier one; its class depends on its cause."""
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
        """Fail all waiting items; a compressor gets the cause at its `yield`, so that it can clean up."""
        waiting = list(waiting)
        for one in waiting:  # before any future is completed: whoever waits may save state, which this may restore
            if isinstance(one, BucketTask):
                one.throw(failure.__cause__ or failure)
        for one in waiting:
            one.fail(failure)
