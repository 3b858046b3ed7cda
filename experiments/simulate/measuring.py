"""Measuring what the step-time model needs: a step's compute, and the compression and payloads of every hook.

Compute is that of a `ddp_core` DistributedDataParallel whose hook answers at once and notes when each bucket came.
Compression is that of one worker among 2 to 16 that live in one process and take turns, so that their gradients really
differ; only the first one's turns are timed. What would be sent by more ranks is counted with one worker that claims to
be one of many, and is answered with what it sent.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import commhooks
import ddp_core
from commhooks import Compressor, Exchanger
from commhooks.communicators import Collective, Communicator, LockstepGroup, Pending
from commhooks.planning.payloads import is_padded, rounds_of
from commhooks.planning.pretending import check_is_among_all
from commhooks.scheduling.lockstep import LockstepLine

from ..hooks import make_hook, policy_of
from ..launch import Send, run_world
from ..machine import machine, versions
from ..runs import check_ddp
from ..specs import Spec
from ..tasks import LoadedTask, load_task
from ..training.lockstep import Gradients, own_gradients
from ..training.stock import is_stock
from .measured import BucketTimes, ComputeTimes, HookTimes, Measured, Sends

WORKERS = (2, 4, 8, 16)
_WARM_UP = 2  # steps that are not counted
_TIMEOUT_SECONDS = 600.0
_COPIES = 8  # of a worker's gradients that must fit into memory: residual, buckets, messages, answers
_SECONDS_OF_A_HOOK = 4.0  # with one number of workers; after these it is timed no more
_LEAST_ROUNDS = 2
_LARGEST_ANSWER = 2e9  # bytes; what would be gathered from more ranks is not counted


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to measure."""

    task: Spec
    hooks: tuple[Spec, ...]
    ranks: tuple[int, ...] = ()  # for which payloads are counted
    workers: tuple[int, ...] = WORKERS  # with which compression is timed, as far as memory allows
    steps: int = 10  # of compute; higher: steadier medians
    rounds: int = 5  # of each hook with each number of workers
    bucket_cap_mb: float | None = None
    seed: int = 0


def measure(asked: Asked, tell: Callable[[str], None]) -> Measured:
    """Measure in a process of its own.

    Raises:
        ValueError: There is no such task or hook, or it does not accept the task's parameters.
        WorldError: The measuring process failed.

    """
    check_ddp("simulate", "core", asked.bucket_cap_mb)
    parameters = dict(load_task(asked.task, asked.seed).model.named_parameters())
    for spec in asked.hooks:
        if is_stock(spec):
            raise ValueError(
                f"hook {spec.label!r} is PyTorch's own, whose rounds cannot be watched: simulate one of ours"
            )
        make_hook(spec, asked.seed).check(parameters, None)
    found: list[Measured] = []

    def hear(message: object) -> None:
        if isinstance(message, Measured):
            found.append(message)
        else:
            tell(str(message))

    run_world(_measure_all, 1, asked, hear, timeout=_TIMEOUT_SECONDS)
    return found[-1]


def _measure_all(rank: int, ranks: int, asked: Asked, send: Send) -> None:
    torch.set_num_threads(1)
    task = load_task(asked.task, asked.seed)
    send(f"measuring the compute of {task.name}")
    clock = ComputeClock(task, asked.bucket_cap_mb)
    clock.warm_up(task.batch(0, 0, 1))
    for step in range(asked.steps):
        clock.step(task.batch(step, 0, 1))
    compute = clock.take()
    del clock  # a DDP must go before its process group does
    workers = _that_fit(asked.workers, task.model)
    _, gradients = own_gradients(task, 0, max(workers))
    hooks = {}
    for spec in asked.hooks:
        send(f"measuring the compression of {spec.label}")
        hooks[spec.label] = measure_hook(spec, compute, gradients, asked)
    parameters = sum(p.numel() for p in task.model.parameters())
    send(Measured(task.name, parameters, compute, hooks, versions(), machine()))


class ComputeClock:
    """A task's model in a DDP whose hook answers at once: its steps are timed, and when each bucket came.

    With several ranks, each of them has one, and all take their steps together.
    """

    def __init__(self, task: LoadedTask, bucket_cap_mb: float | None) -> None:
        self._task = task
        self._names = {id(parameter): name for name, parameter in task.model.named_parameters()}
        self._came: list[tuple[float, tuple[str, ...]]] = []
        self._ddp = ddp_core.DistributedDataParallel(task.model, bucket_cap_mb=bucket_cap_mb)
        self._ddp.register_comm_hook(None, self._answer)
        self._optimizer = task.optimizer()
        self._steps: list[tuple[float, float, list[float]]] = []

    def step(self, batch: Any) -> None:
        """Take a step, and time it."""
        self._came.clear()
        begun = time.perf_counter()
        self._task.loss(self._ddp, batch).backward()
        computed = time.perf_counter()
        self._optimizer.step()
        updated = time.perf_counter()
        self._steps.append((computed - begun, updated - computed, [moment - begun for moment, _ in self._came]))
        self._optimizer.zero_grad()

    def take(self, over_ranks: Callable[[Tensor], object] = lambda times: None) -> ComputeTimes:
        """Return the medians of the steps since the last call, and forget them.

        `over_ranks` may replace each step's times, the rows of a tensor, in place with those of all ranks together.
        """
        times = torch.tensor([[compute, update, *ready] for compute, update, ready in self._steps], dtype=torch.float64)
        self._steps.clear()
        over_ranks(times)
        seconds, optimizer, *ready = np.median(times.numpy(), axis=0).tolist()
        moments = np.maximum.accumulate(ready).clip(max=seconds)
        return ComputeTimes(seconds, optimizer, tuple(moments.tolist()), tuple(names for _, names in self._came))

    def warm_up(self, batch: Any) -> None:
        """Take steps that are not counted: memory is allocated in them, and the DDP rebuilds its buckets."""
        for _ in range(_WARM_UP):
            self.step(batch)
        self._steps.clear()

    def _answer(self, state: object, bucket: ddp_core.GradBucket) -> torch.futures.Future[Tensor]:
        self._came.append((time.perf_counter(), tuple(self._names[id(p)] for p in bucket.parameters())))
        answered: torch.futures.Future[Tensor] = torch.futures.Future()
        answered.set_result(bucket.buffer())
        return answered


def measure_hook(spec: Spec, compute: ComputeTimes, gradients: Sequence[Gradients], asked: Asked) -> HookTimes:
    """Return the times and payloads of one hook, for the buckets of the compute and as many workers as gradients."""
    timed: dict[int, tuple[BucketTimes, ...]] = {}
    for workers in sorted({min(workers, len(gradients)) for workers in asked.workers}):
        timed[workers] = _time_with(spec, compute, gradients[:workers], asked)
    shapes = [[len(one.sends) for one in buckets] for buckets in timed.values()]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"hook {spec.label!r} takes other rounds with more workers, which the model does not know")
    payloads = [tuple(one.sends for one in buckets) for buckets in timed.values()]
    counted: dict[int, tuple[tuple[Sends, ...], ...]] = {}
    is_constant = all(payload == payloads[0] and not any(map(is_padded, payload)) for payload in payloads)
    if len(payloads) == 1 or not is_constant:
        for ranks in sorted(set(asked.ranks) - set(timed) - {1}):
            if _largest_answer(payloads[-1], ranks) <= _LARGEST_ANSWER:
                compressor = make_hook(spec, asked.seed)
                counted[ranks] = tuple(
                    rounds_of(compressor, {name: gradients[0][name].clone() for name in names}, ranks, policy_of(spec))
                    for names in compute.buckets
                )
    return HookTimes(policy_of(spec), timed, counted)


def _that_fit(workers: Sequence[int], model: nn.Module) -> list[int]:
    """Return the numbers of workers whose gradients and state fit into the memory that is free, or the least."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    each = _COPIES * sum(p.numel() * p.element_size() for p in model.parameters())
    return [number for number in workers if number * each <= free] or [min(workers)]


def _largest_answer(payloads: Sequence[Sequence[Sends]], ranks: int) -> float:
    """Return the bytes gathered by so many ranks in a round, if payloads shrank no further."""
    gathered = [
        payload * ranks for rounds in payloads for sends in rounds for kind, payload in sends if kind == "all-gather"
    ]
    return max(gathered, default=0)


class _Stopwatch:
    """What one worker does in its turns: the seconds before each round, and what it starts then."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.seconds: list[float] = []
        self.sends: list[list[tuple[str, int]]] = []
        self.running = 0.0  # seconds since the last round began
        self._began = 0.0
        self._in_round = False

    def begin(self) -> None:
        self._began, self._in_round = time.perf_counter(), False

    def end(self) -> None:
        self.running += time.perf_counter() - self._began

    def start(self, collective: Collective) -> None:
        check_is_among_all(collective)
        if not self._in_round:  # all collectives of a round are started in one turn
            self.end()
            self.seconds.append(self.running)
            self.sends.append([])
            self.running, self._in_round = 0.0, True
        self.sends[-1].append((collective.kind, collective.payload_bytes))
        self._began = time.perf_counter()

    def times(self) -> tuple[list[float], tuple[Sends, ...], float]:
        return self.seconds, tuple(map(tuple, self.sends)), self.running


class _Watched:
    """A communicator whose collectives a stopwatch sees."""

    def __init__(self, inner: Communicator, watch: _Stopwatch) -> None:
        self._inner, self._watch = inner, watch
        self.rank, self.world_size = inner.rank, inner.world_size

    def start(self, collective: Collective) -> Pending:
        self._watch.start(collective)
        return self._inner.start(collective)


class _TimedLine(LockstepLine):
    """A line whose turns a stopwatch times."""

    def __init__(self, communicator: Communicator, policy: str, watch: _Stopwatch) -> None:
        super().__init__(_Watched(communicator, watch), policy)
        self._watch = watch

    def turn(self) -> bool:
        self._watch.begin()
        try:
            return super().turn()
        finally:
            self._watch.end()


def _exchangers(
    like: Gradients, compressor: Compressor, communicators: Sequence[Communicator], policy: str, watch: _Stopwatch
) -> list[Exchanger]:
    """Return an exchanger for each worker of one bucket; the first one's turns are watched."""
    first, *others = communicators
    lines = [_TimedLine(first, policy, watch), *(LockstepLine(other, policy) for other in others)]
    return [Exchanger(like, compressor, line=line) for line in lines]


def _time_with(
    spec: Spec, compute: ComputeTimes, gradients: Sequence[Gradients], asked: Asked
) -> tuple[BucketTimes, ...]:
    """Time every bucket's exchange among as many workers as there are gradients."""
    compressor, policy, watch = make_hook(spec, asked.seed), policy_of(spec), _Stopwatch()
    of_buckets = []
    for names in compute.buckets:
        own = [{name: gradient[name] for name in names} for gradient in gradients]
        communicators = LockstepGroup(len(gradients)).communicators()
        of_buckets.append((own, _exchangers(own[0], compressor, communicators, policy, watch)))
    found: list[list[tuple[list[float], tuple[Sends, ...], float]]] = [[] for _ in of_buckets]
    begun = time.perf_counter()
    for done in range(_WARM_UP + asked.rounds):
        if done >= _WARM_UP + _LEAST_ROUNDS and time.perf_counter() - begun > _SECONDS_OF_A_HOOK:
            break
        for (own, exchangers), times in zip(of_buckets, found, strict=True):
            means = [{name: gradient.clone() for name, gradient in one.items()} for one in own]
            watch.clear()
            commhooks.average_in_lockstep(exchangers, means)
            times.append(watch.times())
    typical = []
    for times in found:
        before, _, after = zip(*times[_WARM_UP:], strict=True)
        seconds = tuple(np.median(before, axis=0).tolist())
        typical.append(BucketTimes(seconds, times[-1][1], statistics.median(after)))  # what the last step sent
    return tuple(typical)
