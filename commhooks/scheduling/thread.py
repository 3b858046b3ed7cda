"""The scheduler without NCCL: a worker thread issues collectives and waits, so that the backward pass need not.

That thread also completes the futures. It owns the connection to the other ranks, and reports its own failures and
those of other ranks.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import sys
import weakref

from torch import Tensor

from commhooks.communicators.connection import Address, WrapCommunicator
from commhooks.communicators.forked import keep_groups
from commhooks.communicators.traffic import Traffic
from commhooks.errors import CommHooksError
from commhooks.scheduling.ledger import Ledger
from commhooks.scheduling.scheduler import POLICIES, Scheduler
from commhooks.scheduling.task import BucketTask
from commhooks.scheduling.worker import StopOrderError, Worker


class ThreadScheduler(Scheduler):
    """Runs tasks on one thread, over its own connection, opened when every rank passes the same `fingerprint`.

    The thread is a daemon that is stopped at exit, never a plain thread, since those are joined before `atexit` runs.
    It holds no reference to this object, so that an unused attachment is collected together with its thread.
    """

    def __init__(
        self, address: Address, fingerprint: str, wrap: WrapCommunicator | None, policy: str, hook_timeout: float | None
    ) -> None:
        self.ledger = Ledger()
        self._worker = Worker(address, fingerprint, wrap, POLICIES[policy], hook_timeout, self.ledger)
        self._stop_when_collected = weakref.finalize(self, Worker.stop, self._worker)
        self._stop_when_collected.atexit = False
        _running.add(self._worker)

    def submit(self, task: BucketTask) -> None:
        """Pass a task to the thread, which the first task starts."""
        self._worker.hand_in(task)

    def wait_until_open(self) -> None:
        """Return when every rank has come."""
        self._worker.start()
        self._worker.opened.wait()
        if self._worker.error is not None:
            raise self._worker.error

    def agree(self, fingerprint: str) -> None:
        """Let the thread compare with the other ranks."""
        agreement: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._worker.hand_in_fingerprint(fingerprint, agreement)
        agreement.result()

    def failure(self) -> CommHooksError | None:
        """Return what ended the thread."""
        error = self._worker.error
        return None if error is None or isinstance(error.__cause__, StopOrderError) else error

    def traffic(self) -> Traffic | None:
        """Return the communicator's counts."""
        return self._worker.traffic

    def working_memory(self) -> list[Tensor]:
        """Return the tensors that the policy keeps."""
        policy = self._worker.policy() if self._worker.policy is not None else None
        return [] if policy is None else policy.working_memory()

    def stop(self) -> None:
        """Stop the thread."""
        self._stop_when_collected()


_running: weakref.WeakSet[Worker] = weakref.WeakSet()


def _keep_groups_of_the_parent() -> None:
    connections = [worker.connection for worker in list(_running)]
    keep_groups(group for connection in connections if connection is not None for group in connection.groups)


os.register_at_fork(after_in_child=_keep_groups_of_the_parent)


@atexit.register
def _stop_all() -> None:
    """Stop every thread, and drop every group, before the interpreter shuts down.

    A group with pending work cannot be destroyed, and a process that ends with one may hang or abort; such a process
    prints a message and exits immediately.
    """
    workers = [worker for worker in _running if not worker.is_forked]
    for worker in workers:
        worker.stop()
    left = [worker.abandoned for worker in workers if worker.abandoned is not None]
    if any(not connection.close(0.0) for connection in left):
        print("commhooks: a collective is still under way at exit: another rank never came; exiting.", file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)
