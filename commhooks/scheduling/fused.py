"""The policy that runs each round of all of a step's buckets together, in as few collectives as possible."""

from __future__ import annotations

from collections import deque

from commhooks.communicators import Communicator
from commhooks.errors import CollectiveError
from commhooks.scheduling.policy import Finish, Policy, Wait
from commhooks.scheduling.task import BucketTask


class Fused(Policy):
    """Holds a step's buckets until the last one has come, then runs each round of all of them at once.

    Buckets are compressed as they come, up to their first request, while the backward pass continues. Those that ask
    for a verdict wait until none of the others has any other request left, and all get the same verdict.
    """

    packs_by_name = True

    def __init__(self, communicator: Communicator, wait: Wait, finish: Finish) -> None:
        super().__init__(communicator, wait, finish)
        self._handed_in: deque[BucketTask] = deque()
        self._step: list[BucketTask] = []
        self._rounds_begun = False

    def add(self, task: BucketTask) -> None:
        """Take the next bucket."""
        self._handed_in.append(task)

    def ends_unit(self, task: BucketTask) -> bool:
        """Return whether this is its step's last bucket."""
        return task.is_last

    @property
    def is_issuing(self) -> bool:
        """Whether a step's last bucket has come, and the step has not ended."""
        return self._rounds_begun or any(task.is_last for task in self._handed_in)

    @property
    def is_working(self) -> bool:
        """The same: a step judges and ends as soon as its last requests are answered."""
        return self.is_issuing

    def cut_short(self, why: str) -> None:
        """Fail the buckets that wait for their step's last one."""
        for stale in [*self._step, *self._handed_in]:
            stale.fail(CollectiveError(f"step {stale.step} was cut short: {why}."))
        self._step.clear()
        self._handed_in.clear()

    def turn(self) -> bool:
        """Wait for a collective, compress a bucket, or begin the rounds if the step's last bucket has come."""
        waiting = next((task for task in self._step if task.under_way), None)
        if waiting is not None:
            self.take_answer_if_there(waiting)
        elif self._rounds_begun:
            self._go_on()
        elif self._handed_in:
            self._begin(self._handed_in.popleft())
        else:
            return False
        return True

    def unfinished(self) -> list[BucketTask]:
        """Return every task whose future is not completed."""
        return [*self._step, *self._handed_in]

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
            handed_in, self._handed_in = self._handed_in, deque()
            self.cut_short(f"step {task.step} began before its end")
            self._handed_in = handed_in

    def _go_on(self) -> None:
        """Resume the tasks that are answered, and start the next round."""
        for task in self._step:
            self.touching = task
            if task.requests:
                task.resume()
        self._ask()

    def _ask(self) -> None:
        """Start what the step's buckets request; if only verdicts are left, judge the buckets and end the step."""
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
