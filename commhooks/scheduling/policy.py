"""In which order the requests of many buckets are issued."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from torch import Tensor

from commhooks.communicators import Communicator, Pending
from commhooks.scheduling.task import BucketTask

Wait = Callable[[Pending], bool]
"""Wait a slice of time for a collective, and say whether it is done."""
Finish = Callable[[BucketTask], None]
"""Give a task's mean to its future."""


class Policy(ABC):
    """Decide the order of collectives: a function of step, bucket and round, whatever the timing.

    `touching` is the task that the policy is at work on, the one to blame when a turn raises.
    """

    touching: BucketTask | None = None

    def __init__(self, communicator: Communicator, wait: Wait, finish: Finish) -> None:
        self.communicator = communicator
        self.wait = wait
        self.finish = finish

    @abstractmethod
    def add(self, task: BucketTask) -> None:
        """Take the next bucket, in the order of hand-in."""

    @abstractmethod
    def turn(self) -> bool:
        """Do one thing; return False if there is nothing to do before another bucket is handed in."""

    @abstractmethod
    def unfinished(self) -> list[BucketTask]:
        """Return every task whose future is not completed."""

    def working_memory(self) -> list[Tensor]:
        """Return the tensors that are kept from step to step: none, unless a policy says otherwise."""
        return []


class Fifo(Policy):
    """Go bucket by bucket: all rounds of one, then all rounds of the next.

    While a bucket's collective is under way, the next bucket is compressed up to its first request, which is local work
    and issues nothing; and once a bucket's last request is issued, the next bucket's first one follows at once.
    """

    def __init__(self, communicator: Communicator, wait: Wait, finish: Finish) -> None:
        super().__init__(communicator, wait, finish)
        self._handed_in: deque[BucketTask] = deque()
        self._issuing: BucketTask | None = None
        self._in_last_round: deque[BucketTask] = deque()

    def add(self, task: BucketTask) -> None:
        """Take the next bucket."""
        self._handed_in.append(task)

    def turn(self) -> bool:
        """Begin a bucket if none is being issued; otherwise compress one ahead, and wait for the oldest collective."""
        if self._issuing is None and self._handed_in:
            self._issuing = self._handed_in.popleft()
            self._begin(self._issuing)
            self._go_on(self._issuing)
            return True
        if self._handed_in:
            self._begin(self._handed_in[0])
        oldest = self._in_last_round[0] if self._in_last_round else self._issuing
        if oldest is None:
            return False
        self._answer_if_done(oldest)
        return True

    def unfinished(self) -> list[BucketTask]:
        """Return every task whose future is not completed."""
        issuing = [self._issuing] if self._issuing is not None else []
        return [*self._in_last_round, *issuing, *self._handed_in]

    def _begin(self, task: BucketTask) -> None:
        self.touching = task
        task.begin()

    def _answer_if_done(self, task: BucketTask) -> None:
        self.touching = task
        assert task.pending is not None, "a task waits for a collective that was never started"
        if not self.wait(task.pending):
            return
        task.resume(task.pending.result)
        self._go_on(task)

    def _go_on(self, task: BucketTask) -> None:
        """Issue what the task asks for now, or finish it."""
        answer_empty_requests(task)
        if task.request is None:
            self._remove(task)
            self.finish(task)
            self.touching = None  # a finished task, and through it the attachment, may be collected now
            return
        task.pending = self.communicator.start(task.request)
        if task.request.last:
            self._in_last_round.append(task)
            self._issuing = None

    def _remove(self, task: BucketTask) -> None:
        if task is self._issuing:
            self._issuing = None
        else:
            self._in_last_round.remove(task)


def answer_empty_requests(task: BucketTask) -> None:
    """Answer requests that nothing would travel for, until the task asks for something else or is done.

    An empty sparse tensor may meet other ranks' full ones, so it travels.
    """
    while task.request is not None and not task.request.tensor.is_sparse and task.request.tensor.numel() == 0:
        task.resume(task.request.room_for_answer(task.world_size))
