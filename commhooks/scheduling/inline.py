"""The scheduler on NCCL: requests are issued where the hook is called, and a stream waits instead of the host.

A hook's future is completed as soon as everything is queued, so the host never waits for the device. A collective that
hangs is then ended, together with the process, by the process group's own timeout. `hook_timeout` requests an error
instead, which requires waiting: a thread completes futures when the device is done, so the backward pass ends no sooner
than the collectives of its step.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from commhooks.communicators import Communicator, Pending
from commhooks.communicators.failure_store import FailureStore
from commhooks.communicators.kernels import Kernels
from commhooks.devices import Mark, SideStream
from commhooks.errors import CollectiveError
from commhooks.scheduling.channels import ConnectionChannel
from commhooks.scheduling.scheduler import Scheduler
from commhooks.scheduling.task import BucketTask
from commhooks.scheduling.worker import JOIN_SECONDS

POLL_SECONDS = 0.0005
"""Seconds between the watch's checks of the device while something is under way."""


class InlineScheduler(Scheduler):
    """A scheduler that issues requests in the hook's call, on two side streams that wait instead of the host (NCCL).

    Under "fifo" a step's buckets take turns on them: while one stream waits for a bucket's collective, the next bucket
    is compressed on the other. All of a bucket's work is on one stream, and so is all of a step's under "fused".
    """

    def __init__(
        self,
        communicator: Communicator,
        agree: Callable[[str, Kernels], None],
        streams: tuple[SideStream, SideStream],
        hook_timeout: float | None = None,
        failures: FailureStore | None = None,
    ) -> None:
        super().__init__(communicator.rank, self._wait, failures, self._look_around)
        self._streams = streams
        self._way = 0
        """The number of the stream in use."""
        self._step: tuple[ConnectionChannel, int] | None = None
        """The step that the streams are working on."""
        self._communicator = communicator
        self._agree = agree
        self._watch = _Watch(hook_timeout, self) if hook_timeout is not None else None
        self._process = os.getpid()

    def open(self, channel: ConnectionChannel, fingerprint: str) -> None:
        """Open a channel, once every rank has passed the same fingerprint."""
        self._read_headers(self._look_around)  # the device may never reach a comparison behind headers that differ
        if self.error is not None:
            raise self.error
        self._agree(fingerprint, channel.kernels)
        self._channels.open(channel, self._communicator, functools.partial(self._complete, channel))

    @torch.no_grad()
    def submit(self, channel: ConnectionChannel, task: BucketTask) -> None:
        """Run the whole exchange; its computation waits on a side stream for the collectives."""
        if self.error is not None or channel.is_closed:
            self._turn_away(channel, task)
            return
        self._take_turns(channel, task)
        with self._stream.entered():
            try:
                self.listen()
                is_added = self._channels.add(channel, task)
                assert is_added, "every unit is issued before the next is handed in, unless that was interrupted"
                while self._channels.turn():
                    pass
            except Exception as error:
                here = self._here(self.place_of(channel, task))
                self.end(error, here, [*self._channels.unfinished(), task])

    def agree(self, channel: ConnectionChannel, fingerprint: str, caller: str) -> None:
        """Compare with the other ranks from this thread."""
        if self.error is not None:  # a collective may be left over, which this one would meet
            raise self.error
        self._agree(fingerprint, channel.kernels)

    def drain(self, channel: ConnectionChannel, caller: str) -> None:
        """Cut short a step whose last bucket has not come; make the caller's stream wait for the buckets handed in.

        The host waits for the watch, which completes futures, and for the headers of several channels' units.
        """
        assert channel.policy is not None, "an inline channel is open from the beginning"
        channel.policy.cut_short(f"{caller} came before its last bucket")
        if self._watch is not None:
            self._watch.drain()
        self._step = None
        for stream in self._streams:
            stream.let_caller_follow()
        self._read_headers(self._look_around)

    def stop(self) -> None:
        """Stop the watch, if there is one, and the calls to the store; warn of ranks that differed at the end."""
        before = self.error
        if os.getpid() == self._process:  # a fork has no device
            self._read_headers(functools.partial(_check_time, time.monotonic() + JOIN_SECONDS))
        if self.error is not before:
            warnings.warn(str(self.error), stacklevel=2)
        if self._watch is not None:
            self._watch.stop()
        if self.failures is not None:
            self.failures.close()

    def end(self, error: Exception, where: str, waiting: Sequence[BucketTask]) -> None:
        """Fail the tasks, then tell the other ranks, whose streams may be waiting for a collective of this one."""
        failure = self._keep(error, where)
        self._fail_all(waiting, failure)
        if failure.__cause__ is error and self.failures is not None:
            self.failures.post(str(failure))  # last, since it may take a while

    def _read_headers(self, look_around: Callable[[], None]) -> None:
        """Read the headers that the host has left for later; end the connection if ranks differ."""
        if self.error is None:
            try:
                self._channels.read_headers(look_around)
            except Exception as error:
                self.end(error, f"rank {self.rank}", [])

    def _look_around(self) -> None:
        """Raise the failure that has ended the connection, if any; called while the host waits for headers."""
        if self.error is not None:  # the watch's: the device may wait for ever
            raise self.error
        self.listen()

    @property
    def _stream(self) -> SideStream:
        return self._streams[self._way]

    def _take_turns(self, channel: ConnectionChannel, task: BucketTask) -> None:
        """Choose a bucket's stream. A step begins on each stream when both have ended the one before."""
        assert channel.policy is not None, "an inline channel is open from the beginning"
        if self._step != (channel, task.step):
            self._step, self._way = (channel, task.step), 0
            first, second = self._streams
            first.join(second)
            second.join(first)
        elif not channel.policy.packs_by_name:
            self._way = 1 - self._way
        channel.policy.way = self._way

    def _wait(self, pending: Pending) -> bool:
        """Make the stream wait for a collective, with marks for the watch where the wait begins and ends."""
        touching = self._channels.touching()
        if self._watch is None or touching is None:
            pending.wait()
            return True
        asked = self._stream.mark()
        pending.wait()
        self._watch.expect(_Stage(*touching, self._stream, asked, self._stream.mark()))
        return True

    def _complete(self, channel: ConnectionChannel, task: BucketTask) -> None:
        if self._watch is None:
            task.succeed()
        else:
            self._watch.expect(_Stage(channel, task, self._stream, None, self._stream.mark()))


def _check_time(until: float) -> None:
    """Raise `CollectiveError` after a time; called while the host waits for headers."""
    if time.monotonic() > until:
        raise CollectiveError("it is not known whether the ranks handed in the same: the device is not done.")


@dataclasses.dataclass(frozen=True)
class _Stage:
    """A section of a stream's queue: a task's collective, or the work after its last one."""

    channel: ConnectionChannel
    task: BucketTask
    stream: SideStream
    asked: Mark | None
    """Reached when the stream begins to wait for the collective; None after the task's last one."""
    reached: Mark


class _Watch:
    """A thread that completes futures as the device progresses, and fails them when a collective takes too long.

    It waits for stages in the order in which they were queued. A stream may reach one before an earlier one of the
    other stream; the time of its collective is then counted from when the earlier one was reached.
    """

    def __init__(self, limit: float, scheduler: InlineScheduler) -> None:
        self._limit = limit
        self._scheduler = scheduler
        self._stages: deque[_Stage] = deque()
        self._unreached = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def expect(self, stage: _Stage) -> None:
        """Add the next stage; fail its task if the thread was told to end."""
        with self._changed:
            if self._stopping:
                stage.task.fail(CollectiveError("the attachment was stopped"))
                return
            self._stages.append(stage)
            self._unreached += 1
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="commhooks watch", daemon=True)
                self._thread.start()

    def drain(self) -> None:
        """Return when every stage has been reached, or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._unreached == 0)

    def stop(self) -> None:
        """End the thread; unfinished tasks fail. A fork has no thread, and may have inherited a lock that is held."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _serve(self) -> None:
        for stage in self._coming():
            try:
                self._wait_for(stage)
                if stage.asked is None and not stage.task.has_ended:
                    with stage.stream.entered():  # where the mean was written, and so where its readers wait
                        stage.task.succeed()
                with self._changed:
                    self._unreached -= 1
                    self._changed.notify_all()
            except Exception as error:  # whatever it is, the backward pass is waiting for these futures
                with self._changed:
                    left = [stage.task, *(later.task for later in self._stages)]
                    self._stages.clear()
                    self._unreached = 0
                    self._changed.notify_all()
                self._scheduler.end(error, self._scheduler.place_of(stage.channel, stage.task), left)

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
            if self._scheduler.error is not None:  # the device may never reach what was queued behind the failed one
                raise self._scheduler.error
            now = time.monotonic()
            if since is None and stage.asked is not None and stage.asked.query():
                since = now  # not before: the inputs of the collective may take time to compute
            if since is not None and now - since > self._limit:
                raise CollectiveError(f"a collective was not done after hook_timeout={self._limit} s.")
            if self._stopping:
                raise CollectiveError("the attachment was stopped while a collective was under way.")
            self._scheduler.listen()
            time.sleep(POLL_SECONDS)
