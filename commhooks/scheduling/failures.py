"""One failure for all that waits: what every scheduler makes of an error, and how it reaches each future."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from commhooks.errors import AttachError, CollectiveError, CommHooksError, CompressorError
from commhooks.scheduling.task import BucketTask


class StopOrderError(CommHooksError):
    """Raised to end a line because it was told to, not because something failed."""


class Waits(Protocol):
    """Whatever waits for the line: a task, or a place in its queue."""

    def fail(self, error: Exception) -> None:
        """Complete its future with the error."""
        ...


def failure_of(error: Exception | BaseException, message: str) -> CommHooksError:
    """Return the error that all who wait are given: of the kind of its cause, which it keeps."""
    kind: type[CommHooksError] = CompressorError
    if isinstance(error, AttachError):
        kind = AttachError
    elif isinstance(error, (CollectiveError, StopOrderError)):
        kind = CollectiveError
    failure = kind(message)
    failure.__cause__ = error
    return failure


def not_started(failure: CommHooksError, where: str) -> CommHooksError:
    """Return the error for what is handed in after a failure."""
    return type(failure)(f"{where}: not started, because of an earlier failure: {failure}")


def fail_all(waiting: Iterable[Waits], failure: CommHooksError) -> None:
    """Fail everything that waits; a compressor sees the cause at its `yield`, so that it can clean up."""
    for one in waiting:
        if isinstance(one, BucketTask):
            one.throw(failure.__cause__ or failure)
        one.fail(failure)
