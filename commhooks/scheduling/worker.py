"""The scheduler without NCCL: a worker thread issues collectives and waits, so that the backward pass need not.

Items are served in the order of submission: buckets, and places at which everything before them must have ended. The
thread completes the futures, owns the connection to the other ranks, and reports its own failures and those of other
ranks. A failure also fails every waiting item.

A fork has only the thread that forked. The destructor of a Gloo group joins the group's threads, so a forked process
that destroyed one, even at its own `sys.exit()`, would hang or crash.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections import deque

import torch
from torch.distributed import distributed_c10d

from commhooks.communicators import Pending
from commhooks.communicators.failure_store import ANSWER_SECONDS, SilentStoreError
from commhooks.communicators.private_group import Address, PrivateGroup, WrapCommunicator
from commhooks.devices import use_own_stream
from commhooks.errors import AttachError, CollectiveError
from commhooks.scheduling.channels import ConnectionChannel
from commhooks.scheduling.scheduler import SLICE_SECONDS, Scheduler, StopOrderError
from commhooks.scheduling.task import BucketTask

SHORT_SLICE_SECONDS = 0.005
"""Seconds between checks for the step's next bucket."""
PATIENCE_SECONDS = 3.0
"""Seconds that the thread, when it ends, waits for unfinished work, and that a process does at its exit."""
JOIN_SECONDS = SLICE_SECONDS + 4 * ANSWER_SECONDS + PATIENCE_SECONDS + 1.0
"""Seconds that stopping waits for the thread: one check, its calls of a silent store (who failed, a roll call twice as
long, and the report of its own end), its patience, and a margin."""


@dataclasses.dataclass(frozen=True, eq=False)
class Halt:
    """A place in the queue, reached when everything handed in before it has ended."""

    done: concurrent.futures.Future[None] = dataclasses.field(default_factory=concurrent.futures.Future)
    fingerprint: str | None = None
    """The text that is then compared with the other ranks'; None: no comparison."""
    caller: str = ""
    """The call that compares, for ranks that do not make it."""
    opens: bool = False
    """True if the channel is open afterwards."""

    def fail(self, error: Exception) -> None:
        """Complete the future with the error."""
        if not self.done.done():
            self.done.set_exception(error)


class Worker(Scheduler):
    """A connection's thread: tasks go in, futures are completed. Stops before the interpreter shuts down.

    The thread is a daemon that is stopped at exit, never a plain thread, since those are joined before `atexit` runs.
    """

    def __init__(self, address: Address, wrap: WrapCommunicator | None, hook_timeout: float | None) -> None:
        failures = address.failure_store()
        super().__init__(address.rank, self._wait_slice, failures)
        self.abandoned: PrivateGroup | None = None
        self.private_group: PrivateGroup | None = None
        self._address = address
        self._failures = failures
        self._wrap = wrap
        self._process = os.getpid()
        self._hook_timeout = hook_timeout
        self._queue: deque[tuple[ConnectionChannel, BucketTask | Halt]] = deque()
        self._submitted = 0
        """The number of tasks and comparisons handed in: the same on every rank at one place of the queue."""
        self._ended = 0
        """The number of these tasks and comparisons that have ended."""
        self._comparisons: set[int] = set()
        """The numbers of this rank's own comparisons."""
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._more_to_come = False
        self._waiting_since: tuple[Pending, float] | None = None
        _running.add(self)

    @property
    def is_forked(self) -> bool:
        """True for a copy in a forked process: no thread runs there, and its locks may be held."""
        return os.getpid() != self._process

    def open(self, channel: ConnectionChannel, fingerprint: str) -> None:
        """Queue the opening of a channel, once every rank has passed the same fingerprint."""
        # The first channel opens the connection: before that, there is nobody to announce it to.
        caller = f"the first average of {channel.title}" if self._thread is not None else ""
        self.submit(channel, Halt(channel.opened, fingerprint, caller, opens=True))

    def submit(self, channel: ConnectionChannel, item: BucketTask | Halt) -> None:
        """Queue a task or a place, or fail it immediately if the connection has failed or stopped.

        The first one starts the thread.
        """
        if self.is_forked:
            item.fail(
                CollectiveError(
                    f"{self.place_of(channel, item)}: this process was forked from the one that attached, and has no "
                    "connection to the other ranks; train in the process that attached, or attach in this one."
                )
            )
            return
        only_waits = isinstance(item, Halt) and item.fingerprint is None  # for what a closed channel handed in before
        with self._changed:
            if self.error is None and not self._stopping and (only_waits or not channel.is_closed):
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name="commhooks", daemon=True)
                    self._thread.start()
                self._queue.append((channel, item))
                if isinstance(item, BucketTask):
                    self._submitted += 1
                elif item.fingerprint is not None:
                    self._comparisons.add(self._submitted)
                    if item.caller:
                        self._failures.announce(self._submitted, item.caller)
                    self._submitted += 1
                self._changed.notify()
                return
        self._turn_away(channel, item)

    def agree(self, channel: ConnectionChannel, fingerprint: str, caller: str) -> None:
        """Compare with the other ranks on the thread, after everything handed in before has ended."""
        halt = Halt(fingerprint=fingerprint, caller=caller)
        self.submit(channel, halt)
        halt.done.result()

    def drain(self, channel: ConnectionChannel, caller: str) -> None:
        """Wait until everything handed in has ended, successfully or not; cut short a step without its last bucket."""
        if self._thread is threading.current_thread():
            raise AttachError(f"{caller}: it was called where a mean was completed; call it between two steps.")
        if self._thread is not None:
            halt = Halt(caller=caller)
            self.submit(channel, halt)
            concurrent.futures.wait([halt.done])

    def stop(self) -> None:
        """Order the thread to end, and wait for it for a limited time."""
        if self.is_forked:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is None or self._thread is threading.current_thread() or sys.is_finalizing():
            return  # no daemon thread runs any more while the interpreter shuts down
        self._thread.join(JOIN_SECONDS)

    @torch.no_grad()  # a gradient may require one itself: double backward
    def _serve(self) -> None:
        try:
            self.private_group = PrivateGroup(self._address, self._wrap, self._hook_timeout, self._wait)
            busy = False
            while not self._stopping:
                self._admit(block=not busy)
                busy = self._channels.turn()
        except BaseException as error:  # whatever it is, the futures must receive it, or the backward pass hangs
            self._fail(error)
        else:
            self._fail(StopOrderError("the attachment was stopped"))
        finally:
            self._channels.release()
            self._drop_connection()

    def _admit(self, *, block: bool) -> None:
        """Serve queued items as far as possible; with `block`, wait until there is one."""
        with self._changed:
            limit = (
                self.private_group.timeout if self._hook_timeout is None and self.private_group else self._hook_timeout
            )
            while block and not self._queue and not self._stopping:
                if not self._changed.wait(limit if self._channels.unfinished() else None):
                    raise CollectiveError(f"the step's next bucket did not come within {limit:g} s.")
        while self._queue and not self._stopping and self._take(*self._queue[0]):
            self._queue.popleft()  # not before: if taking it fails, it fails with everything else that waits

    def _take(self, channel: ConnectionChannel, item: BucketTask | Halt) -> bool:
        """Serve the head of the queue; return False if something else must end first."""
        if isinstance(item, Halt):
            return self._halt(channel, item)
        if channel.refusal is not None:
            self._turn_away(channel, item)
            self._ended += 1
            return True
        if item.ready:
            use_own_stream(item.bucket.memory.device)
        if not self._channels.add(channel, item):
            return False
        self._more_to_come = not item.is_last
        return True

    def _halt(self, channel: ConnectionChannel, halt: Halt) -> bool:
        if not self._channels.is_idle:
            return False
        if channel.policy is not None:
            channel.policy.cut_short(f"{halt.caller} came before its last bucket")
        if halt.fingerprint is not None:
            assert self.private_group is not None and self.private_group.communicator is not None
            try:
                self.private_group.agree(halt.fingerprint, channel.kernels, self._wait)
            except AttachError as error:  # raised on every rank; what was attached before stays attached
                if halt.opens and self._channels.are_none:
                    raise
                if halt.opens:
                    channel.refusal = error
                halt.fail(error)
                self._ended += 1
                return True
            self._ended += 1
            if halt.opens:
                self._channels.open(channel, self.private_group.communicator, self._complete)
                return True
        halt.done.set_result(None)
        return True

    def _complete(self, task: BucketTask) -> None:
        self._ended += 1
        task.succeed()

    def _wait_slice(self, pending: Pending) -> bool:
        """Wait briefly for a collective; raise if this rank must stop, another has failed, or it took too long."""
        try:
            pending.wait(SHORT_SLICE_SECONDS if self._more_to_come else SLICE_SECONDS)
        except TimeoutError:
            self._look_around(pending)
            return False
        self._waiting_since = None
        return True

    def _wait(self, pending: Pending) -> None:
        """Wait for a collective, however many slices it takes."""
        while not self._wait_slice(pending):
            pass

    def _look_around(self, pending: Pending) -> None:
        if self._stopping:
            raise StopOrderError(
                "the attachment was stopped, or the process is ending, while a collective was under way"
            )
        now = time.monotonic()
        if self._waiting_since is None or self._waiting_since[0] is not pending:
            self._waiting_since = (pending, now)
        limit = None if self._channels.are_none else self._hook_timeout  # opening has the group's timeout
        if limit is not None and now - self._waiting_since[1] > limit:
            raise CollectiveError(f"a collective was not done after hook_timeout={limit} s.")
        self.listen()
        if stray := self._stray():
            raise CollectiveError(stray)

    def _stray(self) -> str:
        """Return a sentence about a rank that compares while this one has handed in a bucket; "" if none is known."""
        number, what = self._failures.announced
        if self._ended <= number < self._submitted and number not in self._comparisons:
            return f"{what}, and this rank does not: every rank must, between the same two steps."
        return ""

    def _fail(self, error: BaseException) -> None:
        """Fail every future that waits here, then tell the other ranks.

        The order matters: the store, through which they are told, may not answer. The group is dropped last, so
        that a rank woken by that finds the reason.
        """
        head = self._queue[0][1] if self._queue else None
        here = self._here(f"rank {self.rank}, {head.caller}" if isinstance(head, Halt) and head.caller else "")
        is_news = bool(self._channels.unfinished() or self._queue) or not isinstance(error, StopOrderError)
        why = self._explained(error) if is_news else str(error)
        with self._changed:
            failure = self._keep(error, here, why)
            waiting = [*self._channels.unfinished(), *(item for _, item in self._queue)]
            self._queue.clear()
        if (touching := self._channels.touching()) is not None and touching[1] not in waiting:
            waiting.append(touching[1])
        self._fail_all(waiting, failure)
        if is_news:
            self._failures.post(str(failure))

    def _explained(self, error: BaseException) -> str:
        """Return the reason why this rank fails, with the other ranks' reports, within a few seconds in any case."""
        own = f"{type(error).__name__}: {error}"
        if isinstance(error, (SilentStoreError, AttachError)):  # there is nobody to ask, or all know
            return own
        try:
            first = self._failures.failure_now()
            if first is not None:
                return f"stopped, because this failed first: {first}"
            stray = self._stray()
            if stray and stray not in own:
                return f"{own} {stray}"
            silent = self._failures.silent_ranks() if isinstance(error, CollectiveError) and not stray else []
        except SilentStoreError as silence:
            told = str(silence)
            return f"{own} {told[:1].upper()}{told[1:]}"
        return f"{own} No answer from rank {', '.join(map(str, silent))}." if silent else own

    def _drop_connection(self) -> None:
        private_group, self.private_group = self.private_group, None
        self._waiting_since = None
        self._failures.close()
        if private_group is not None and not private_group.close(PATIENCE_SECONDS):
            self.abandoned = private_group


_running: weakref.WeakSet[Worker] = weakref.WeakSet()


def _keep_groups_of_the_parent() -> None:
    """Leak torch.distributed's groups, and private ones, so that this forked process never destroys them."""
    private_groups = [worker.private_group for worker in list(_running)]
    private = [group for private_group in private_groups if private_group is not None for group in private_group.groups]
    for group in (*distributed_c10d._world.pg_map, *private):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_groups_of_the_parent)


@atexit.register
def _stop_all() -> None:
    """Stop every thread, and drop every group, before the interpreter shuts down.

    A group with pending work cannot be destroyed, and a process that ends with one may hang or abort; such a process
    waits a little longer, because a peer that ends too ends that work, and then prints a message and exits immediately.
    """
    workers = [worker for worker in _running if not worker.is_forked]
    for worker in workers:
        worker.stop()
    left = [worker.abandoned for worker in workers if worker.abandoned is not None]
    end = time.monotonic() + PATIENCE_SECONDS
    if any(not private_group.close(end - time.monotonic()) for private_group in left):
        print("commhooks: a collective is still under way at exit: another rank never came; exiting.", file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)
