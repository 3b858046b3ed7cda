"""The scheduler for workers that live in one process and take turns, each doing the same at its turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.communicators import Communicator, LockstepGroup, Pending, RecordingCommunicator
from commhooks.communicators.traffic import Traffic
from commhooks.errors import AttachError, CollectiveError, CommHooksError, CompressorError
from commhooks.scheduling.ledger import Ledger
from commhooks.scheduling.scheduler import POLICIES, Scheduler
from commhooks.scheduling.task import BucketTask


class LockstepScheduler(Scheduler):
    """Runs tasks on demand: `run_in_turns` gives all workers' schedulers their turns until none has anything to do."""

    def __init__(self, communicator: Communicator, policy: str) -> None:
        self.ledger = Ledger()
        self.rank = communicator.rank
        self._communicator = RecordingCommunicator(communicator)
        self._policy = POLICIES[policy](self._communicator, _is_done, self._finish)
        self._error: CommHooksError | None = None

    def submit(self, task: BucketTask) -> None:
        """Take a task; fail it if an earlier one has failed."""
        if self._error is not None:
            task.fail(self._error)
        else:
            self._policy.add(task)

    @torch.no_grad()
    def turn(self) -> bool:
        """Do one thing; return False if there is nothing to do. An error that it raises fails every unfinished task."""
        if self._error is not None:
            return False
        try:
            return self._policy.turn()
        except Exception as error:
            kind = CollectiveError if isinstance(error, CollectiveError) else CompressorError
            blamed = self._policy.touching
            where = blamed.where(self.rank) if blamed is not None else f"rank {self.rank}"
            self._error = kind(f"{where}: {type(error).__name__}: {error}")
            self._error.__cause__ = error
            for task in self._policy.unfinished():
                task.throw(error)
                task.fail(self._error)
            raise self._error from error

    def wait_until_open(self) -> None:
        """Return immediately."""

    def agree(self, fingerprint: str) -> None:
        """Return immediately: workers of one process are given the same fingerprint."""

    def failure(self) -> CommHooksError | None:
        """Return the first failure."""
        return self._error

    def traffic(self) -> Traffic:
        """Return the communicator's counts."""
        return self._communicator.traffic

    def working_memory(self) -> list[Tensor]:
        """Return the memory of messages."""
        return self._policy.working_memory()

    def stop(self) -> None:
        """Do nothing: nothing runs in the background."""

    def _finish(self, task: BucketTask) -> None:
        task.settle()
        self.ledger.enter(task, self._communicator.traffic)
        task.succeed()


class LockstepLine:
    """One worker's line to the others in its process; see `Line`."""

    def __init__(self, communicator: Communicator, policy: str = "fifo") -> None:
        self.rank = communicator.rank
        self.world_size = communicator.world_size
        self.policy = policy
        self.scheduler = LockstepScheduler(communicator, policy)

    def carries_groups(self, device: torch.device) -> bool:
        """Return True."""
        return True

    def open(self, device: torch.device, fingerprint: str) -> LockstepScheduler:
        """Return the scheduler."""
        return self.scheduler


def lockstep_lines(world_size: int, policy: str = "fifo") -> list[LockstepLine]:
    """Return one line for each of `world_size` workers in this process."""
    if policy not in POLICIES:
        raise AttachError(f"policy={policy!r}: policy must be one of {', '.join(POLICIES)}.")
    return [LockstepLine(communicator, policy) for communicator in LockstepGroup(world_size).communicators()]


def run_in_turns(schedulers: Sequence[LockstepScheduler]) -> None:
    """Give all workers their turns until none has anything to do; raise the first error."""
    while any([scheduler.turn() for scheduler in schedulers]):  # noqa: C419 - every worker takes its turn
        pass


def _is_done(pending: Pending) -> bool:
    """Return True: workers take turns, so an answer is ready when it is waited for."""
    pending.wait()
    return True
