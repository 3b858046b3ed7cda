"""The time of a step of data-parallel training: a simulation of one rank's processor and its link.

All ranks are alike, so one stands for all. It has two serial resources.

- *The processor.* The training thread computes `Step.compute` seconds (forward and backward pass); bucket i is handed
  to the worker thread after `Bucket.ready` of them. The worker thread compresses. With one core both use it in turns,
  the worker first: each second of compression, and of the processor time that transfers need, delays the backward pass
  by a second. With more cores they run side by side. Where a mean is due (`Bucket.due`), the training thread waits for
  it.
- *The link.* Collectives pass it one after another, in the order in which they were started, each for
  `Link.transfer(...).seconds`.

The order of rounds is that of `commhooks.scheduling`. "fifo": all rounds of a bucket before those of the next, except
that the next one is compressed up to its first collective meanwhile, and begins as soon as this bucket's last round is
on the link. "fused": when the last bucket has been compressed, each round of all buckets at once, with one collective
of each kind.

    seconds     = compute + compression + waiting
    compute     = forward and backward pass and optimizer
    compression = seconds of compression in which nothing is computed
    waiting     = all other seconds: nothing is computed or compressed, or the core is busy with transfers
    utilisation = compute / seconds

Left out: ranks that are slower than others, loss of packets, congestion between collectives of other jobs, and the
worker's wait of up to 5 ms before it looks for the next bucket while a collective is on its way.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Sequence

from commhooks.experiments.timing.link import Network, Transfer

Sends = tuple[tuple[str, int], ...]
"""The kind of each collective of a round, and the bytes that this rank puts in."""
POLICIES = ("fifo", "fused")
_NO_TIME = 1e-12  # seconds: differences that come from rounding


@dataclasses.dataclass(frozen=True)
class Stage:
    """A round of a bucket's exchange: the compression before it, and the collectives that it starts."""

    seconds: float
    """Seconds of compression on this rank's processor, before the collectives."""
    collectives: Sends
    """The kind of each collective, and the bytes that this rank contributes to it. The rank waits for all answers
    together."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket of gradients and its exchange."""

    ready: float
    """Seconds of compute, from the beginning of the step, after which its gradients are ready."""
    stages: tuple[Stage, ...]
    """The rounds of its exchange."""
    after: float = 0.0
    """Seconds of compression after the last answer: unpacking, and writing the mean."""
    due: float = math.inf
    """Seconds of compute from the beginning of the step, beyond which the training thread waits for the mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A rank's work in one step."""

    compute: float
    """Seconds of the forward and the backward pass."""
    optimizer: float = 0.0
    """Seconds of the optimizer, after the last mean."""
    buckets: tuple[Bucket, ...]
    """The buckets, in the order in which they become ready."""
    policy: str = "fifo"
    """"fifo" or "fused", as for `commhooks.attach`."""
    cores: int = 1
    """The cores of each rank; with 2 or more, compression overlaps the backward pass."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"Step(policy={self.policy!r}): policy must be one of {', '.join(POLICIES)}.")
        if self.cores < 1:
            raise ValueError(f"Step(cores={self.cores!r}): cores must be at least 1.")
        seconds = [bucket.after for bucket in self.buckets]
        seconds += [stage.seconds for bucket in self.buckets for stage in bucket.stages]
        if not all(0 <= value < math.inf for value in (self.compute, self.optimizer, *seconds)):
            raise ValueError("Step: compute, optimizer and compression must be in [0, inf), in seconds.")
        ready = [0.0, *(bucket.ready for bucket in self.buckets), self.compute]
        if ready != sorted(ready):
            raise ValueError(
                f"Step: buckets must be ready one after another, from 0 to {self.compute:g} s of compute (got "
                f"{', '.join(f'{value:g}' for value in ready[1:-1])})."
            )
        if any(bucket.due < bucket.ready for bucket in self.buckets):
            raise ValueError("Step: no bucket's mean can be due before its gradients are ready.")


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A step's seconds; compute + compression + waiting = seconds."""

    seconds: float
    """Seconds of the whole step."""
    compute: float
    """Forward and backward pass, and the optimizer."""
    compression: float
    """Seconds of compression in which nothing was computed."""
    waiting: float
    """All other seconds."""
    communication: float
    """Seconds in which the link was busy, hidden or not."""
    bytes_sent: int
    """Bytes sent per rank, on average over the ranks."""

    @property
    def utilisation(self) -> float:
        """The part of the step in which the rank computes."""
        return self.compute / self.seconds if self.seconds else 1.0

    def divided(self, parts: int) -> StepTime:
        """Return a part of it."""
        values = {name: value / parts for name, value in vars(self).items()}
        return StepTime(**values | {"bytes_sent": round(values["bytes_sent"])})


def step_time(step: Step, link: Network, ranks: int) -> StepTime:
    """Return the step's time for this number of ranks.

    Raises:
        ValueError: The ranks do not fill their hosts, or a transfer takes for ever.

    """
    rank = _Rank(step, link, ranks)
    (rank.run_fused if step.policy == "fused" else rank.run_fifo)()
    rank.compute_on()
    compute = step.compute + step.optimizer
    seconds = rank.now + step.optimizer
    return StepTime(
        seconds=seconds,
        compute=compute,
        compression=rank.compression,
        waiting=max(0.0, seconds - compute - rank.compression),
        communication=sum(transfer.seconds for transfer in rank.transfers),
        bytes_sent=sum(transfer.bytes_sent for transfer in rank.transfers),
    )


class _Task:
    """A bucket on its way."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.begun = 0  # stages that were compressed
        self.arrival = 0.0  # of the last answers asked for
        self.afterwards = 0.0  # seconds of the processor that these answers will take

    @property
    def is_in_last_round(self) -> bool:
        return self.begun == len(self.bucket.stages)


class _Rank:
    """One rank's processor and link."""

    def __init__(self, step: Step, link: Network, ranks: int) -> None:
        self.step, self.link, self.ranks = step, link, ranks
        self.now = 0.0
        self.done = 0.0  # seconds of compute
        self.compression = 0.0  # seconds in which the worker kept the training thread from computing
        self.transfers: list[Transfer] = []
        self._known: dict[tuple[str, int], Transfer] = {}  # by kind and payload
        self._loads: deque[tuple[float, float, float]] = deque()  # (begin, end, share of a core), in order
        self._free_at = 0.0  # the link
        self._left = deque(map(_Task, step.buckets))  # not ready yet
        self._awaited = sorted(bucket.due for bucket in step.buckets)  # of means that are not there
        self._submitted: deque[_Task] = deque()

    def run_fifo(self) -> None:
        """Follow `commhooks.scheduling.policy.Fifo`."""
        issuing: _Task | None = None
        in_last_round: deque[_Task] = deque()
        while True:
            self._submit()
            if issuing is None and self._submitted:
                issuing = self._submitted.popleft()
                if issuing.begun == 0:
                    self._compress(issuing)
            elif self._submitted and self._submitted[0].begun == 0:
                self._compress(self._submitted[0])
                continue
            else:
                oldest = in_last_round[0] if in_last_round else issuing
                if oldest is None and not self._left:
                    return
                if not self._wait_for(oldest):
                    continue
                if in_last_round:
                    self._end(in_last_round.popleft())
                    continue
                assert issuing is not None, "only a task is waited for"
                self._compress(issuing)
            if not issuing.bucket.stages:
                self._end(issuing)
                issuing = None
                continue
            issuing.arrival, issuing.afterwards = self._send(issuing.bucket.stages[issuing.begun - 1].collectives)
            if issuing.is_in_last_round:
                in_last_round.append(issuing)
                issuing = None

    def run_fused(self) -> None:
        """Follow `commhooks.scheduling.policy.Fused`."""
        tasks = list(self._left)
        while self._left or self._submitted:
            self._submit()
            if self._submitted:
                self._compress(self._submitted.popleft())
            else:
                self._wait_for(None)
        asking = [task for task in tasks if task.bucket.stages]
        while asking:
            payloads: Counter[str] = Counter()
            for task in asking:
                for kind, payload in task.bucket.stages[task.begun - 1].collectives:
                    payloads[kind] += payload
            arrival, afterwards = self._send(tuple(payloads.items()))
            self._advance(arrival)
            self._work(afterwards)
            asking = [task for task in asking if not task.is_in_last_round]
            for task in asking:
                self._compress(task)
        self._work(sum(task.bucket.after for task in tasks))
        self._awaited.clear()

    def compute_on(self) -> None:
        """Compute until nothing is left."""
        self.now, self.done = self._when(self.step.compute - self.done), self.step.compute

    def _submit(self) -> None:
        while self._left and self._left[0].bucket.ready <= self.done + _NO_TIME:
            self._submitted.append(self._left.popleft())

    def _end(self, task: _Task) -> None:
        """Unpack the last answers, and write the mean."""
        self._work(task.afterwards + task.bucket.after)
        self._awaited.remove(task.bucket.due)

    @property
    def _goal(self) -> float:
        """The seconds of compute up to which the training thread need not wait for a mean."""
        return min(self.step.compute, self._awaited[0]) if self._awaited else self.step.compute

    def _compress(self, task: _Task) -> None:
        """Compress up to the next round."""
        if task.bucket.stages:
            self._work(task.afterwards + task.bucket.stages[task.begun].seconds)
        task.begun += 1

    def _work(self, seconds: float) -> None:
        """Let the worker thread compress for this many seconds of a core."""
        if self.step.cores > 1:
            computed = min(seconds, self._goal - self.done)
            self.now, self.done = self.now + seconds, self.done + computed
            self.compression += seconds - computed
        else:
            self.now = self._when(seconds)
            self.compression += seconds

    def _send(self, collectives: Sequence[tuple[str, int]]) -> tuple[float, float]:
        """Put a round's collectives on the link; return when they will be done, and the seconds that follow."""
        transfers = [self._transfer(kind, payload) for kind, payload in collectives]
        for transfer in transfers:
            begin = max(self.now, self._free_at)
            self._free_at = begin + transfer.seconds
            self.transfers.append(transfer)
            if transfer.processor_seconds and self.step.cores == 1:
                self._loads.append((begin, self._free_at, transfer.processor_seconds / transfer.seconds))
        return self._free_at, max((transfer.afterwards for transfer in transfers), default=0.0)

    def _transfer(self, kind: str, payload: int) -> Transfer:
        """Return a collective's transfer; most buckets send as much as another one."""
        key = kind, payload
        if key not in self._known:
            self._known[key] = self.link.transfer(kind, payload, self.ranks)
        return self._known[key]

    def _wait_for(self, task: _Task | None) -> bool:
        """Compute until a task's answers are there, or the next bucket is ready; return whether they are there."""
        if task is not None and task.arrival <= self.now + _NO_TIME:
            return True
        is_next = self._left and self._left[0].bucket.ready <= self._goal
        ready = self._when(self._left[0].bucket.ready - self.done) if is_next else math.inf
        arrival = math.inf if task is None else task.arrival
        if not min(ready, arrival) < math.inf:
            raise ValueError("the step would never end: a time of its compression or of the network is not finite")
        self._advance(min(ready, arrival))
        if ready <= arrival:
            self.done = max(self.done, self._left[0].bucket.ready)
        return False

    def _advance(self, moment: float) -> None:
        """Compute until a moment."""
        self._forget_past_loads()
        free = moment - self.now
        for begin, end, share in self._loads:
            if begin >= moment:
                break
            free -= share * max(0.0, min(end, moment) - max(begin, self.now))
        self.done = min(self._goal, self.done + max(0.0, free))
        self.now = max(self.now, moment)

    def _when(self, seconds: float) -> float:
        """Return the moment at which the core will have had this many seconds besides those of transfers."""
        self._forget_past_loads()
        moment = self.now
        for begin, end, share in self._loads:
            if moment + seconds <= begin:
                break
            if begin > moment:
                seconds, moment = seconds - (begin - moment), begin
            free = (1 - share) * (end - moment)
            if seconds <= free:
                return moment + (seconds / (1 - share) if share < 1 else 0.0)
            seconds, moment = seconds - free, end
        return moment + seconds

    def _forget_past_loads(self) -> None:
        while self._loads and self._loads[0][1] <= self.now:
            self._loads.popleft()
