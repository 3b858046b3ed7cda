"""The orders in which the requests of many buckets are issued: bucket by bucket, or a whole step at once."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from commhooks.communicators import Communicator, Pending
from commhooks.errors import CollectiveError
from commhooks.language.requests import Request
from commhooks.scheduling.packing import Packer
from commhooks.scheduling.task import BucketTask
from commhooks.tensors import all_finite

PolicyName = Literal["fifo", "fused"]
"""Bucket by bucket, or a whole step at once."""
Wait = Callable[[Pending], bool]
"""A function that waits for a collective for a short time, and returns whether it is done."""
Finish = Callable[[BucketTask], None]
"""A function that passes a task's mean to its future."""


class Policy(ABC):
    """The order of collectives: a function of step, bucket and round, independent of timing.

    `touching` is the task in progress, to which an error in a turn is attributed.
    """

    touching: BucketTask | None = None
    way: int = 0
    """The number of the stream in use; streams share no messages, since another may still be reading them."""
    packs_by_name: ClassVar[bool] = False
    """True if messages carry the requests of many buckets."""

    def __init__(self, communicator: Communicator, wait: Wait, finish: Finish) -> None:
        self.communicator = communicator
        self.wait = wait
        self.finish = finish
        self._packer = Packer(communicator.world_size, by_name=self.packs_by_name)

    @abstractmethod
    def add(self, task: BucketTask) -> None:
        """Add the next bucket, in the order of submission."""

    @abstractmethod
    def turn(self) -> bool:
        """Do one thing; return False if there is nothing to do before another bucket is handed in."""

    @abstractmethod
    def unfinished(self) -> list[BucketTask]:
        """Return every task whose future is not completed."""

    @abstractmethod
    def ends_unit(self, task: BucketTask) -> bool:
        """Return whether the task's collectives can be issued without waiting for further buckets."""

    @property
    @abstractmethod
    def is_issuing(self) -> bool:
        """True while a unit that has come still has requests to issue."""

    @property
    @abstractmethod
    def is_working(self) -> bool:
        """True while a unit that has come has not ended."""

    @abstractmethod
    def cut_short(self, why: str) -> None:
        """Fail the buckets of a step whose last one has not come and will not come."""

    def working_memory(self) -> list[Tensor]:
        """Return the memory of messages, which is kept between steps."""
        return self._packer.memories()

    def start(self, tasks: Sequence[BucketTask]) -> None:
        """Start the collectives that the tasks have requested, as few as possible.

        If a collective carries parts of several tasks, the first of them waits for it and distributes all its answers.
        """
        begun = time.perf_counter()
        asked: list[tuple[BucketTask, int]] = []
        requests: list[Request] = []
        for task in tasks:
            for number, request in enumerate(task.requests):
                asked.append((task, number))
                requests.append(request)
        collectives = self._packer.pack(requests, self.way, tasks[0].step)
        tasks[0].seconds_compressing += time.perf_counter() - begun
        for packed in collectives:
            self.touching = asked[packed.places[0].request][0]
            if packed.message is not None:
                self.touching.messages.append(packed.message)
            pending = self.communicator.start(packed.collective)
            self.touching.under_way.append((pending, packed, asked))

    def take_answer_if_there(self, task: BucketTask) -> bool:
        """Wait a short time for the oldest collective of a task; return whether all of them are answered."""
        self.touching = task
        pending, packed, asked = task.under_way[0]
        if not self.wait(pending):
            return False
        task.under_way.popleft()
        begun = time.perf_counter()
        for place, answer in zip(packed.places, packed.answers(pending.result), strict=True):
            taker, number = asked[place.request]
            taker.take(number, place.number, answer)
        task.seconds_compressing += time.perf_counter() - begun
        return not task.under_way

    def judge(self, tasks: Sequence[BucketTask]) -> None:
        """Judge all tasks that have asked for a verdict together, and give each the same one."""
        self.touching = tasks[0]
        begun = time.perf_counter()
        finite = all_finite([tensor for task in tasks if task.judge is not None for tensor in task.judge.tensors])
        tasks[0].seconds_compressing += time.perf_counter() - begun
        for task in tasks:
            self.touching = task
            task.answer_verdict(finite)


class Fifo(Policy):
    """The policy that runs bucket by bucket: all rounds of one, then all rounds of the next.

    While a bucket's collective is under way, the next bucket is compressed up to its first request, which is local work
    and issues nothing; and as soon as a bucket's last request is issued, the next bucket's first one follows.
    """

    def __init__(self, communicator: Communicator, wait: Wait, finish: Finish) -> None:
        super().__init__(communicator, wait, finish)
        self._submitted: deque[BucketTask] = deque()
        self._issuing: BucketTask | None = None
        self._in_last_round: deque[BucketTask] = deque()

    def add(self, task: BucketTask) -> None:
        """Take the next bucket."""
        self._submitted.append(task)

    def ends_unit(self, task: BucketTask) -> bool:
        """Return True: every bucket is a unit."""
        return True

    @property
    def is_issuing(self) -> bool:
        """True while a bucket waits for its turn, or has requests left after its next answer."""
        return self._issuing is not None or bool(self._submitted)

    @property
    def is_working(self) -> bool:
        """True while a bucket is unfinished."""
        return self.is_issuing or bool(self._in_last_round)

    def cut_short(self, why: str) -> None:
        """Do nothing: no bucket waits for another."""

    def turn(self) -> bool:
        """Begin a bucket if none is being issued; otherwise compress one ahead, and wait for the oldest collective."""
        if self._issuing is None and self._submitted:
            self._issuing = self._submitted.popleft()
            self._begin(self._issuing)
            self._go_on(self._issuing)
            return True
        if self._submitted:
            self._begin(self._submitted[0])
        oldest = self._in_last_round[0] if self._in_last_round else self._issuing
        if oldest is None:
            return False
        if self.take_answer_if_there(oldest):
            oldest.resume()
            self._go_on(oldest)
        return True

    def unfinished(self) -> list[BucketTask]:
        """Return every task whose future is not completed."""
        issuing = [self._issuing] if self._issuing is not None else []
        return [*self._in_last_round, *issuing, *self._submitted]

    def _begin(self, task: BucketTask) -> None:
        self.touching = task
        task.begin()

    def _go_on(self, task: BucketTask) -> None:
        """Issue the task's current requests; if it has none, judge it if it asks for that, and finish it."""
        if task.requests:
            self.start([task])
            if task is self._issuing and task.asks_last:
                self._in_last_round.append(task)
                self._issuing = None
            return
        if task.judge is not None:
            self.judge([task])
        if task is self._issuing:
            self._issuing = None
        else:
            self._in_last_round.remove(task)
        self.finish(task)
        self.touching = None  # a finished task, and through it the attachment, can now be collected


class Fused(Policy):
    """The policy that holds a step's buckets until the last one has come, then runs each round of all of them at once.

    Buckets are compressed as they come, up to their first request, while the backward pass continues. Buckets that ask
    for a verdict wait until no bucket has any other request left, and all get the same verdict.
    """

    packs_by_name = True

    def __init__(self, communicator: Communicator, wait: Wait, finish: Finish) -> None:
        super().__init__(communicator, wait, finish)
        self._submitted: deque[BucketTask] = deque()
        self._step: list[BucketTask] = []
        self._rounds_begun = False

    def add(self, task: BucketTask) -> None:
        """Take the next bucket."""
        self._submitted.append(task)

    def ends_unit(self, task: BucketTask) -> bool:
        """Return whether this is its step's last bucket."""
        return task.is_last

    @property
    def is_issuing(self) -> bool:
        """True from the arrival of a step's last bucket until the step has ended."""
        return self._rounds_begun or any(task.is_last for task in self._submitted)

    @property
    def is_working(self) -> bool:
        """The same as `is_issuing`: a step judges and ends as soon as its last requests are answered."""
        return self.is_issuing

    def cut_short(self, why: str) -> None:
        """Fail the buckets that wait for their step's last one."""
        for stale in [*self._step, *self._submitted]:
            error = CollectiveError(f"step {stale.step} was cut short: {why}.")
            stale.throw(error)
            stale.fail(error)
        self._step.clear()
        self._submitted.clear()

    def turn(self) -> bool:
        """Wait for a collective, compress a bucket, or begin the rounds if the step's last bucket has come."""
        waiting = next((task for task in self._step if task.under_way), None)
        if waiting is not None:
            self.take_answer_if_there(waiting)
        elif self._rounds_begun:
            self._go_on()
        elif self._submitted:
            self._begin(self._submitted.popleft())
        else:
            return False
        return True

    def unfinished(self) -> list[BucketTask]:
        """Return every task whose future is not completed."""
        return [*self._step, *self._submitted]

    def _begin(self, task: BucketTask) -> None:
        self.touching = task
        self._drop_a_step_that_was_cut_short(task)
        self._step.append(task)
        task.begin()
        if task.is_last:
            self._rounds_begun = True
            self._ask()

    def _drop_a_step_that_was_cut_short(self, task: BucketTask) -> None:
        """Fail an earlier step's buckets whose last one never came, for example because the backward pass raised."""
        if self._step and self._step[0].step != task.step:
            submitted, self._submitted = self._submitted, deque()
            self.cut_short(f"step {task.step} began before its end")
            self._submitted = submitted

    def _go_on(self) -> None:
        """Resume the tasks that are answered, and start the next round."""
        for task in self._step:
            self.touching = task
            if task.requests:
                task.resume()
        self._ask()

    def _ask(self) -> None:
        """Start the requests of the step's buckets; if only verdicts are left, judge the buckets and end the step."""
        asking = [task for task in self._step if task.requests]
        if asking:
            self.start(asking)
            return
        to_judge = [task for task in self._step if task.judge is not None]
        if to_judge:
            self.judge(to_judge)
        self._rounds_begun = False
        while self._step:
            self.finish(self._step[0])
            self._step.pop(0)
        self.touching = None


POLICIES: dict[PolicyName, type[Policy]] = {"fifo": Fifo, "fused": Fused}
"""Orders of collectives, by the name that `attach` takes."""
