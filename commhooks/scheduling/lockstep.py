"""Workers that live in one process and take turns."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import torch

from commhooks.communicators import Communicator, LockstepGroup, Pending
from commhooks.errors import AttachError
from commhooks.scheduling.channels import ConnectionChannel
from commhooks.scheduling.policy import POLICIES, PolicyName
from commhooks.scheduling.scheduler import Scheduler
from commhooks.scheduling.task import BucketTask


class LockstepConnection(Scheduler):
    """A worker's connection to the others in its process; see `Connection`.

    Tasks run on demand: `run_in_turns` gives all workers' connections their turns until none has anything to do.
    """

    def __init__(self, communicator: Communicator, policy: PolicyName = "fifo") -> None:
        super().__init__(communicator.rank, _is_done)
        self.world_size: int = communicator.world_size
        self.policy = policy
        self._communicator = communicator
        self._queue: deque[tuple[ConnectionChannel, BucketTask]] = deque()
        self._joined = Counter[str]()

    def carries_groups(self, device: torch.device) -> bool:
        """Return True."""
        return True

    def join(self, name: str = "") -> int:
        """Reserve a channel, and return how many of its name were reserved before."""
        self._joined[name] += 1
        return self._joined[name] - 1

    def open(self, channel: ConnectionChannel, device: torch.device, fingerprint: str) -> LockstepConnection:
        """Open a reserved channel; workers of one process are given the same fingerprint."""
        self._channels.open(channel, self._communicator, BucketTask.succeed)
        return self

    def leave(self) -> None:
        """Do nothing: nothing runs in the background."""

    def check_ranks(self) -> None:
        """Do nothing: workers of one process stay."""

    def submit(self, channel: ConnectionChannel, task: BucketTask) -> None:
        """Take a task; fail it if an earlier one has failed, or the channel is closed."""
        if self.error is not None or channel.is_closed:
            self._turn_away(channel, task)
        else:
            self._queue.append((channel, task))

    def agree(self, channel: ConnectionChannel, fingerprint: str, caller: str) -> None:
        """Return immediately: workers of one process are given the same fingerprint."""

    def drain(self, channel: ConnectionChannel, caller: str) -> None:
        """Raise `AttachError` if anything is under way: only all workers together can end it."""
        if self.error is None and (self._queue or not self._channels.is_idle):
            raise AttachError(f"{caller}: a step is under way; let the workers take their turns first.")

    @torch.no_grad()
    def turn(self) -> bool:
        """Do one thing; return False if there is nothing to do. An error that it raises fails every unfinished task."""
        if self.error is not None:
            return False
        try:
            if self._queue and self._channels.add(*self._queue[0]):
                self._queue.popleft()
                return True  # what it started is answered once every worker has started it
            return self._channels.turn()
        except Exception as error:
            failure = self._keep(error, self._here())
            self._fail_all([*self._channels.unfinished(), *(task for _, task in self._queue)], failure)
            self._queue.clear()
            raise failure from error


def lockstep_connections(world_size: int, policy: PolicyName = "fifo") -> list[LockstepConnection]:
    """Return one connection for each of `world_size` workers in this process."""
    if policy not in POLICIES:
        raise AttachError(f"policy={policy!r}: policy must be one of {', '.join(POLICIES)}.")
    return [LockstepConnection(communicator, policy) for communicator in LockstepGroup(world_size).communicators()]


@torch.inference_mode(False)  # messages and state are used again
def run_in_turns(connections: Sequence[LockstepConnection]) -> None:
    """Run all workers in turn until none has anything to do; raise the first error."""
    while any([connection.turn() for connection in connections]):  # noqa: C419 - every worker takes its turn
        pass


def _is_done(pending: Pending) -> bool:
    """Return True: workers take turns, so an answer is ready when it is waited for."""
    pending.wait()
    return True
