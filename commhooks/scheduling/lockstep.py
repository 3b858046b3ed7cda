"""The scheduler for workers that live in one process and take turns, each doing the same at its turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from commhooks.communicators import Communicator, LockstepGroup, Pending
from commhooks.errors import AttachError, CommHooksError
from commhooks.scheduling.failures import fail_all, failure_of, not_started
from commhooks.scheduling.lanes import Lane, Lanes
from commhooks.scheduling.scheduler import POLICIES, Scheduler
from commhooks.scheduling.task import BucketTask


class LockstepScheduler(Scheduler):
    """Runs tasks on demand: `run_in_turns` gives all workers' lines their turns until none has anything to do."""

    def __init__(self, line: LockstepLine, policy: str, number: int = 0, name: str = "") -> None:
        super().__init__(number, name, policy)
        self._line = line
        line.add(self.lane)

    def submit(self, task: BucketTask) -> None:
        """Take a task; fail it if an earlier one has failed."""
        self._line.submit(self.lane, task)

    def wait_until_open(self) -> None:
        """Return immediately."""

    def agree(self, fingerprint: str, caller: str) -> None:
        """Return immediately: workers of one process are given the same fingerprint."""

    def drain(self, caller: str) -> None:
        """Raise `AttachError` if anything is under way: only all workers together can end it."""
        if self._line.error is None and not self._line.is_idle:
            raise AttachError(f"{caller}: a step is under way; let the workers take their turns first.")

    def failure(self) -> CommHooksError | None:
        """Return the first failure."""
        return self._line.error


class LockstepLine:
    """One worker's line to the others in its process; see `Line`."""

    def __init__(self, communicator: Communicator, policy: str = "fifo") -> None:
        self.rank = communicator.rank
        self.world_size = communicator.world_size
        self.policy = policy
        self.error: CommHooksError | None = None
        self._lanes = Lanes(self.rank, _is_done)
        self._communicator = communicator
        self._queue: deque[tuple[Lane, BucketTask]] = deque()
        self._joined = 0
        self.scheduler = LockstepScheduler(self, policy)
        """That of the first lane."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._queue and self._lanes.is_idle

    def add(self, lane: Lane) -> None:
        """Open a lane."""
        lane.open(self._communicator, _is_done, BucketTask.succeed)
        self._lanes.open(lane)

    def submit(self, lane: Lane, task: BucketTask) -> None:
        """Take a task; fail it if an earlier one has failed."""
        if self.error is not None:
            task.fail(not_started(self.error, self._lanes.where(lane, task)))
        else:
            self._queue.append((lane, task))

    @torch.no_grad()
    def turn(self) -> bool:
        """Do one thing; return False if there is nothing to do. An error that it raises fails every unfinished task."""
        if self.error is not None:
            return False
        try:
            if self._queue and self._lanes.add(*self._queue[0]):
                self._queue.popleft()
                return True  # what it started is answered once every worker has started it
            return self._lanes.turn()
        except Exception as error:
            blamed = self._lanes.touching()
            where = self._lanes.where(*blamed) if blamed is not None else f"rank {self.rank}"
            self.error = failure_of(error, f"{where}: {type(error).__name__}: {error}")
            fail_all([*self._lanes.unfinished(), *(task for _, task in self._queue)], self.error)
            self._queue.clear()
            raise self.error from error

    def carries_groups(self, device: torch.device) -> bool:
        """Return True."""
        return True

    def join(self) -> int:
        """Reserve a lane, and return its number."""
        self._joined += 1
        return self._joined - 1

    def leave(self) -> None:
        """Do nothing: nothing runs in the background."""

    def open(self, number: int, name: str, policy: str, device: torch.device, fingerprint: str) -> LockstepScheduler:
        """Return the scheduler of a reserved lane; workers of one process are given the same fingerprint."""
        return LockstepScheduler(self, policy, number, name) if number else self.scheduler


def lockstep_lines(world_size: int, policy: str = "fifo") -> list[LockstepLine]:
    """Return one line for each of `world_size` workers in this process."""
    if policy not in POLICIES:
        raise AttachError(f"policy={policy!r}: policy must be one of {', '.join(POLICIES)}.")
    return [LockstepLine(communicator, policy) for communicator in LockstepGroup(world_size).communicators()]


def run_in_turns(lines: Sequence[LockstepLine]) -> None:
    """Give all workers their turns until none has anything to do; raise the first error."""
    while any([line.turn() for line in lines]):  # noqa: C419 - every worker takes its turn
        pass


def _is_done(pending: Pending) -> bool:
    """Return True: workers take turns, so an answer is ready when it is waited for."""
    pending.wait()
    return True
