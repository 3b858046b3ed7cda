"""The scheduler without NCCL: a worker thread issues collectives and waits, so that the backward pass need not.

That thread also completes the futures. It owns the connection to the other ranks, and reports its own failures and
those of other ranks.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref

from commhooks.communicators.forked import keep_groups
from commhooks.errors import CommHooksError
from commhooks.scheduling.failures import StopOrderError
from commhooks.scheduling.scheduler import Scheduler
from commhooks.scheduling.task import BucketTask
from commhooks.scheduling.worker import Halt, Worker


class ThreadScheduler(Scheduler):
    """A lane of a worker's line, opened when every rank passes the same `fingerprint`."""

    def __init__(self, worker: Worker, fingerprint: str, policy: str, number: int = 0, name: str = "") -> None:
        super().__init__(number, name, policy)
        self._worker = worker
        caller = f"the first average of {self.lane.title}" if number else ""  # the first lane connects the line
        self._opening = Halt(fingerprint=fingerprint, caller=caller, opens=True)
        worker.hand_in(self.lane, self._opening)

    def submit(self, task: BucketTask) -> None:
        """Pass a task to the thread."""
        self._worker.hand_in(self.lane, task)

    def wait_until_open(self) -> None:
        """Return when every rank has come."""
        self._opening.done.result()

    def agree(self, fingerprint: str, caller: str) -> None:
        """Let the thread compare with the other ranks, once everything handed in before has ended."""
        halt = Halt(fingerprint=fingerprint, caller=caller)
        self._worker.hand_in(self.lane, halt)
        halt.done.result()

    def drain(self, caller: str) -> None:
        """Wait until the thread has come to everything handed in."""
        self._worker.drain(self.lane, caller)

    def failure(self) -> CommHooksError | None:
        """Return what ended the thread, or kept the lane from opening."""
        error = self._worker.error
        return self.lane.refusal if error is None or isinstance(error.__cause__, StopOrderError) else error


def run_until_collected(worker: Worker, owner: object) -> None:
    """Stop a worker with its owner, the line; and before the interpreter shuts down, if that comes first.

    The thread is a daemon that is stopped at exit, never a plain thread, since those are joined before `atexit` runs.
    It holds no reference to its line, so that an unused attachment is collected together with its thread.
    """
    weakref.finalize(owner, Worker.stop, worker).atexit = False
    _running.add(worker)


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
