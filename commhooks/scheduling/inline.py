"""The scheduler on NCCL: requests are issued where the hook is called, and a stream waits instead of the host.

A hook's future is completed as soon as everything is queued, so the host does not wait for the device anywhere. What
hangs then is ended by the process group's own timeout, with the process. `hook_timeout` asks for an error instead, and
that needs somebody to wait: futures are completed by a thread, when the device is done, so the backward pass ends no
sooner than the collectives of its step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from commhooks.communicators import Communicator, Pending, RecordingCommunicator
from commhooks.communicators.traffic import Traffic
from commhooks.errors import CollectiveError, CommHooksError, CompressorError
from commhooks.scheduling.ledger import Ledger
from commhooks.scheduling.scheduler import POLICIES, Scheduler
from commhooks.scheduling.task import BucketTask
from commhooks.scheduling.worker import JOIN_SECONDS, SLICE_SECONDS

POLL_SECONDS = 0.0005
"""How often the watch looks at the device, while something is under way."""


class Mark(Protocol):
    """A place in a stream's queue; a CUDA event."""

    def query(self) -> bool:
        """Return whether the device has come to it."""
        ...


class Board(Protocol):
    """Where ranks tell each other why one failed. Nothing here waits for the store."""

    def post(self, cause: str) -> None:
        """Tell the other ranks."""
        ...

    def failure(self) -> str | None:
        """Return what some rank told, if that is known; raise `CommHooksError` if the store is gone."""
        ...

    def close(self) -> None:
        """End; called after the last of the others."""
        ...


class SideStream:
    """The stream on which compressors compute, and which waits for collectives."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device

    def follow(self) -> None:
        """Let what comes next wait for what was queued so far where the hook is called."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which everything is queued on this stream."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """Return a mark behind what was queued so far."""
        mark: Mark = self._stream.record_event()
        return mark


class InlineScheduler(Scheduler):
    """Issue requests where the hook is called, on a side stream that waits instead of the host (NCCL)."""

    def __init__(
        self,
        communicator: Communicator,
        agree: Callable[[str], None],
        stream: SideStream,
        policy: str,
        hook_timeout: float | None = None,
        board: Board | None = None,
    ) -> None:
        self.ledger = Ledger()
        self._communicator = RecordingCommunicator(communicator)
        self._agree = agree
        self._stream = stream
        self._policy = POLICIES[policy](self._communicator, self._wait, self._finish)
        self._outcome = _Outcome(communicator.rank, board)
        self._watch = _Watch(hook_timeout, self._outcome, stream) if hook_timeout is not None else None
        self._stop_when_collected = weakref.finalize(self, _stop, self._watch, board)

    @torch.no_grad()
    def submit(self, task: BucketTask) -> None:
        """Run the whole exchange; what it computes waits on the side stream for what it asked for."""
        if self._outcome.error is not None:
            task.fail(self._outcome.not_started(task))
            return
        self._stream.follow()
        with self._stream.entered():
            self._policy.add(task)
            try:
                self._outcome.listen()
                while self._policy.turn():
                    pass
            except Exception as error:
                tasks = [*self._policy.unfinished(), task]
                for unfinished in tasks:
                    unfinished.throw(error)
                self._outcome.end(error, self._policy.touching or task, tasks)

    def wait_until_open(self) -> None:
        """Return at once: the process group stands already."""

    def agree(self, fingerprint: str) -> None:
        """Ask the other ranks from here."""
        self._agree(fingerprint)

    def failure(self) -> CommHooksError | None:
        """Return the first failure."""
        return self._outcome.error

    def traffic(self) -> Traffic | None:
        """Return the communicator's counts."""
        return self._communicator.traffic

    def working_memory(self) -> list[Tensor]:
        """Return what the policy keeps."""
        return self._policy.working_memory()

    def stop(self) -> None:
        """End the watch, if there is one, and the calls to the store."""
        self._stop_when_collected()

    def _wait(self, pending: Pending) -> bool:
        """Let the stream wait for a collective; the watch sees when it begins to, and when it is through."""
        if self._watch is None:
            pending.wait()
            return True
        assert self._policy.touching is not None, "a collective is waited for that belongs to no task"
        asked = self._stream.mark()
        pending.wait()
        self._watch.expect(_Stage(self._policy.touching, asked, self._stream.mark()))
        return True

    def _finish(self, task: BucketTask) -> None:
        task.settle()
        self.ledger.enter(task, self._communicator.traffic)
        if self._watch is None:
            task.succeed()
        else:
            self._watch.expect(_Stage(task, None, self._stream.mark()))


def _stop(watch: _Watch | None, board: Board | None) -> None:
    if watch is not None:
        watch.stop()
    if board is not None:
        board.close()


class _Outcome:
    """How the work ended, for the training thread and the watch; the other ranks hear of it here, and are heard."""

    def __init__(self, rank: int, board: Board | None) -> None:
        self.error: CommHooksError | None = None
        self._rank = rank
        self._board = board
        self._listened = 0.0
        self._lock = threading.Lock()

    def listen(self) -> None:
        """Raise `CollectiveError` if another rank has told that it failed."""
        now = time.monotonic()
        if self._board is None or now - self._listened < SLICE_SECONDS:
            return
        self._listened = now
        cause = self._board.failure()
        if cause is not None:
            raise CollectiveError(f"another rank failed: {cause}")

    def end(self, error: Exception, blamed: BucketTask, tasks: list[BucketTask]) -> None:
        """Fail the tasks, then tell the other ranks: that may take a while. What failed before is the cause of all."""
        kind = CollectiveError if isinstance(error, CollectiveError) else CompressorError
        with self._lock:
            first, is_news = self.error, self.error is None
            if first is None:
                first = self.error = kind(f"{blamed.where(self._rank)}: {type(error).__name__}: {error}")
                first.__cause__ = error
        for task in tasks:
            task.fail(first)
        if is_news:
            self._tell(first)

    def not_started(self, task: BucketTask) -> CommHooksError:
        """Return the error of a task that comes after the end."""
        assert self.error is not None, "nothing has failed"
        cause = f"not started, because of an earlier failure: {self.error}"
        return type(self.error)(f"{task.where(self._rank)}: {cause}")

    def _tell(self, error: CommHooksError) -> None:
        """Tell the other ranks, whose streams wait for a collective of this one."""
        if self._board is not None:
            self._board.post(str(error))


@dataclasses.dataclass(frozen=True)
class _Stage:
    """A stretch of the stream's queue: a collective of a task, or what comes behind its last one."""

    task: BucketTask
    asked: Mark | None
    """Passed when the stream begins to wait for the collective; None behind the task's last one."""
    reached: Mark

    @property
    def is_last(self) -> bool:
        """Whether the task's mean is in place then."""
        return self.asked is None


class _Watch:
    """Complete futures when the device has come so far, on a thread; fail them when a collective takes too long.

    Stages are reached in the order in which they were queued, for they lie on one stream.
    """

    def __init__(self, limit: float, outcome: _Outcome, stream: SideStream) -> None:
        self._limit = limit
        self._outcome = outcome
        self._stream = stream
        self._stages: deque[_Stage] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def expect(self, stage: _Stage) -> None:
        """Take the next stage; fail its task if the thread was told to end."""
        with self._changed:
            if self._stopping:
                stage.task.fail(CollectiveError("the attachment was stopped"))
                return
            self._stages.append(stage)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="commhooks watch", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread; what is under way fails. A fork has no thread, and may have inherited a lock that is held."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _serve(self) -> None:
        for stage in self._coming():
            try:
                self._wait_for(stage)
                if stage.is_last:
                    self._deliver(stage.task)
            except Exception as error:  # whatever it is: the backward pass waits for these futures
                with self._changed:
                    left = [stage.task, *(later.task for later in self._stages)]
                    self._stages.clear()
                self._outcome.end(error, stage.task, left)

    def _coming(self) -> Iterator[_Stage]:
        """Yield stages as they come, until told to stop and none is left."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stages or self._stopping)
                if not self._stages:
                    return
                stage = self._stages.popleft()
            yield stage

    def _wait_for(self, stage: _Stage) -> None:
        since: float | None = None
        while not stage.reached.query():
            if self._outcome.error is not None:  # the device may never come to what was queued behind that
                raise self._outcome.error
            now = time.monotonic()
            if since is None and stage.asked is not None and stage.asked.query():
                since = now  # not before: what the collective is computed from may take its time
            if since is not None and now - since > self._limit:
                raise CollectiveError(f"a collective was not done after hook_timeout={self._limit} s.")
            if self._stopping:
                raise CollectiveError("the attachment was stopped while a collective was under way.")
            self._outcome.listen()
            time.sleep(POLL_SECONDS)

    def _deliver(self, task: BucketTask) -> None:
        if not task.future.done():
            with self._stream.entered():  # where the mean was written, and so where its readers wait
                task.succeed()
