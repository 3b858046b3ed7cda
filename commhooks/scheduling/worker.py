"""The worker thread of an attachment, which issues its collectives, waits for them, and reports failures."""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
import weakref
from collections import deque

import torch

from commhooks.communicators import Pending
from commhooks.communicators.connection import Address, Connection, WrapCommunicator, open_connection
from commhooks.communicators.noticeboard import ANSWER_SECONDS, SilentStoreError
from commhooks.communicators.traffic import Traffic
from commhooks.errors import AttachError, CollectiveError, CommHooksError, CompressorError
from commhooks.scheduling.ledger import Ledger
from commhooks.scheduling.policy import Policy
from commhooks.scheduling.task import BucketTask

SLICE_SECONDS = 0.2
"""How often a waiting rank checks whether another has reported a failure, or whether it should stop."""
SHORT_SLICE_SECONDS = 0.005
"""How often it checks for the step's next bucket."""
PATIENCE_SECONDS = 3.0
"""How long the thread, when it ends, waits for unfinished work."""
JOIN_SECONDS = SLICE_SECONDS + 4 * ANSWER_SECONDS + PATIENCE_SECONDS + 1.0
"""How long stopping waits for the thread: one check, everything that it asks of a silent store (who failed, a roll call
twice as long, and the report of its own end), its patience, and a margin."""


class Worker:
    """The state shared by the training thread and the worker thread: tasks go in, futures are completed."""

    def __init__(
        self,
        address: Address,
        fingerprint: str,
        wrap: WrapCommunicator | None,
        policy: type[Policy],
        hook_timeout: float | None,
        ledger: Ledger,
    ) -> None:
        self.opened = threading.Event()
        self.error: CommHooksError | None = None
        self.traffic: Traffic | None = None
        self.abandoned: Connection | None = None
        self.policy: weakref.ref[Policy] | None = None
        self._address = address
        self._board = address.noticeboard()
        self._fingerprint = fingerprint
        self._wrap = wrap
        self._rank = address.rank
        self._process = os.getpid()
        self._make_policy = policy
        self._hook_timeout = hook_timeout
        self._ledger = ledger
        self._tasks: deque[BucketTask] = deque()
        self._agreements: deque[tuple[str, concurrent.futures.Future[None]]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.connection: Connection | None = None
        self._is_open = False
        self._more_to_come = False
        self._waiting_since: tuple[Pending, float] | None = None
        self._looked_for_failure = 0.0

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy in a forked process: no thread runs there, and its locks may be held."""
        return os.getpid() != self._process

    def start(self) -> None:
        """Start the thread, once."""
        with self._changed:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._serve, name="commhooks", daemon=True)
                self._thread.start()

    def hand_in(self, task: BucketTask) -> None:
        """Put a task into the queue, or fail it immediately if the scheduler has failed or stopped."""
        if self.is_forked:
            task.fail(CollectiveError(f"{task.where(self._rank)}: {FORKED}"))
            return
        self.start()
        with self._changed:
            if self.error is None and not self._stopping:
                self._tasks.append(task)
                self._changed.notify()
                return
        earlier = self.error or CollectiveError("the attachment was stopped")
        task.fail(type(earlier)(f"{task.where(self._rank)}: not started, because of an earlier failure: {earlier}"))

    def hand_in_fingerprint(self, fingerprint: str, agreement: concurrent.futures.Future[None]) -> None:
        """Put a fingerprint into the queue, or fail its future immediately if the scheduler has failed or stopped."""
        if self.is_forked:
            agreement.set_exception(CollectiveError(f"rank {self._rank}: {FORKED}"))
            return
        self.start()
        with self._changed:
            if self.error is None and not self._stopping:
                self._agreements.append((fingerprint, agreement))
                self._changed.notify()
                return
        agreement.set_exception(self.error or CollectiveError("the attachment was stopped"))

    def stop(self) -> None:
        """Tell the thread to end, and wait for it for a limited time."""
        if self.is_forked:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    @torch.no_grad()  # a gradient may require one itself: double backward
    def _serve(self) -> None:
        policy: Policy | None = None
        try:
            self.connection = open_connection(self._address, self._wrap, self._hook_timeout, self._wait)
            assert self.connection.communicator is not None
            self.connection.agree(self._fingerprint, self._wait)
            self._is_open = True
            self.traffic = self.connection.communicator.traffic
            policy = self._make_policy(self.connection.communicator, self._wait_slice, self._finish)
            self.policy = weakref.ref(policy)
            self.opened.set()
            busy = False
            while not self._stopping:
                self._admit(policy, block=not busy)
                busy = policy.turn()
        except BaseException as error:  # whatever it is, the futures must receive it, or the backward pass hangs
            self._fail(policy, error)
        else:
            self._fail(policy, StopOrderError("the attachment was stopped"))
        finally:
            policy = None
            self.opened.set()
            self._drop_connection()

    def _admit(self, policy: Policy, *, block: bool) -> None:
        """Pass the policy what was handed in; with `block`, wait for that."""
        with self._changed:
            limit = self.connection.timeout if self._hook_timeout is None and self.connection else self._hook_timeout
            while block and not self._tasks and not self._agreements and not self._stopping:
                if not self._changed.wait(limit if policy.unfinished() else None):
                    raise CollectiveError(f"the step's next bucket did not come within {limit:g} s.")
            tasks, agreements = list(self._tasks), list(self._agreements)
            self._tasks.clear()
            self._agreements.clear()
        for text, agreement in agreements:
            self._agree(text, agreement)
        for task in tasks:
            if task.ready is not None:
                _use_side_stream(task.bucket.memory.device)
            self._more_to_come = not task.is_last
            policy.add(task)

    def _agree(self, fingerprint: str, agreement: concurrent.futures.Future[None]) -> None:
        assert self.connection is not None, "fingerprints are compared over a connection"
        try:
            self.connection.agree(fingerprint, self._wait)
        except AttachError as error:  # raised on every rank; what was attached before stays attached
            agreement.set_exception(error)
        except BaseException as error:
            self._agreements.appendleft((fingerprint, agreement))  # it fails together with everything else that waits
            raise error
        else:
            agreement.set_result(None)

    def _finish(self, task: BucketTask) -> None:
        assert self.traffic is not None, "a task is finished before the line is open"
        task.settle()
        self._ledger.enter(task, self.traffic)
        task.succeed()

    def _wait_slice(self, pending: Pending) -> bool:
        """Wait briefly for a collective; raise if this rank is to stop, another has failed, or it took too long."""
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
        limit = self._hook_timeout if self._is_open else None  # opening has the group's timeout
        if limit is not None and now - self._waiting_since[1] > limit:
            raise CollectiveError(f"a collective was not done after hook_timeout={limit} s.")
        if now - self._looked_for_failure < SLICE_SECONDS:
            return
        self._looked_for_failure = now
        cause = self._board.failure()
        if cause is not None:
            raise CollectiveError(f"another rank failed: {cause}")

    def _fail(self, policy: Policy | None, error: BaseException) -> None:
        """Fail every future that waits here, then tell the other ranks.

        The order matters: the store, through which they are told, may not answer. The line to them is dropped last, so
        that whoever is woken by that finds the reason.
        """
        blamed = policy.touching if policy is not None else None
        here = blamed.where(self._rank) if blamed is not None else f"rank {self._rank}"
        idle = (policy is None or not policy.unfinished()) and not self._tasks
        is_news = not (idle and isinstance(error, StopOrderError))
        cause = self._explained(here, error) if is_news else f"{here}: {error}"
        with self._changed:
            self.error = _as_error(error, cause)
            tasks = [*(policy.unfinished() if policy is not None else []), *self._tasks]
            agreements = [agreement for _, agreement in self._agreements]
            self._tasks.clear()
            self._agreements.clear()
        self.error.__cause__ = error
        for agreement in agreements:
            agreement.set_exception(self.error)
        if blamed is not None and blamed not in tasks:
            tasks.append(blamed)
        for task in tasks:
            _fail_task(task, error, self.error)
        if is_news:
            self._board.post(cause)

    def _explained(self, here: str, error: BaseException) -> str:
        """Return why this rank fails, including what the other ranks report; within a few seconds, whatever they do."""
        own = f"{here}: {type(error).__name__}: {error}"
        if isinstance(error, (SilentStoreError, AttachError)):  # there is nobody to ask, or all know
            return own
        try:
            first = self._board.failure_now()
            if first is not None:
                return f"{here}: stopped, because this failed first: {first}"
            silent = self._board.silent_ranks() if isinstance(error, CollectiveError) else []
        except SilentStoreError as silence:
            return f"{own} {_capitalized(str(silence))}"
        return f"{own} No answer from rank {', '.join(map(str, silent))}." if silent else own

    def _drop_connection(self) -> None:
        connection, self.connection = self.connection, None
        self._waiting_since = None
        self._board.close()
        if connection is not None and not connection.close(PATIENCE_SECONDS):
            self.abandoned = connection


class StopOrderError(CommHooksError):
    """Raised to end the thread because it was told to, not because something failed."""


FORKED = (
    "this process was forked from the one that attached, and has no line to the other ranks; "
    "train in the process that attached, or attach in this one."
)


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _as_error(error: BaseException, message: str) -> CommHooksError:
    if isinstance(error, AttachError):
        return AttachError(message)
    if isinstance(error, (CollectiveError, StopOrderError)):
        return CollectiveError(message)
    return CompressorError(message)


def _fail_task(task: BucketTask, cause: BaseException, error: CommHooksError) -> None:
    task.throw(cause)
    task.fail(error)


def _use_side_stream(device: torch.device) -> None:
    """Give this thread its own stream, once."""
    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
