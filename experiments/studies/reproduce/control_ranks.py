"""What the ranks of `control-link` run: steps on a link that changes, and steps in turns on one that does not."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import commhooks
from commhooks import Adaptive
from experiments.hooks import make_hook, policy_of
from experiments.launch import Send
from experiments.specs import Spec
from experiments.tasks import LoadedTask, load_task
from experiments.training.registration import wrap_in_ddp

_WARM_UP = 3  # steps that are not counted: memory is allocated, and the DDP rebuilds its buckets


@dataclass(frozen=True)
class NewRate:
    """Rank 0 asks for another rate of all links, in bits per second; None: no limit."""

    rate: float | None


@dataclass(frozen=True, kw_only=True)
class Phases:
    """A run over links whose rate changes after so many steps."""

    task: Spec
    ladder: tuple[Spec, ...]
    fixed: Spec | None  # the only compressor; None: the controller chooses
    rates: tuple[float | None, ...]  # of the phases, in bits per second
    steps: int  # of a phase
    bucket_cap_mb: float


@dataclass(frozen=True)
class Ran:
    """What came out of a run, on rank 0."""

    seconds: list[float]  # of each step, on the rank where it took longest
    rungs: list[str]  # the compressor of each step
    decisions: list[tuple[int, str, str, str]]  # step, from, to, reason
    replacing: list[float]  # seconds of each step's call of the controller in which it moved
    equal: bool  # whether the replicas were equal, bit for bit, after every phase


def run_phases(rank: int, ranks: int, phases: Phases, send: Send) -> None:
    """Take the steps of all phases; rank 0 asks for each phase's rate when its first step begins."""
    torch.set_num_threads(1)
    task = load_task(phases.task)
    worker = _Worker(task, phases.ladder, phases.fixed, phases.bucket_cap_mb)
    for step in range(_WARM_UP if phases.fixed is not None else 0):
        worker.step(step)
    worker.forget()
    equal = True
    for rate in phases.rates:
        if rank == 0:
            send(NewRate(rate))
        for _ in range(phases.steps):
            worker.step(len(worker.seconds))
        equal = equal and _replicas_are_equal(task.model)
        dist.barrier()
    seconds = _longest(worker.seconds)
    worker.attachment.detach()
    if rank == 0:
        send(Ran(seconds, worker.rungs, worker.decisions, worker.replacing, equal))
    del worker  # a DDP must go before its process group does


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A controller beside a plain all-reduce, in turns, on links without a limit."""

    task: Spec
    ladder: tuple[Spec, ...]
    turns: int
    steps: int  # of a turn
    bucket_cap_mb: float


@dataclass(frozen=True)
class Beside:
    """Seconds of each turn's steps, on the rank where they took longest."""

    dense: list[float]
    again: list[float]  # of a second plain all-reduce: what turns differ by without any cause
    adaptive: list[float]
    at_first: list[float]  # of the controller's steps before the first turn, while it tried its rungs
    chosen: str


def run_turns(rank: int, ranks: int, asked: Turns, send: Send) -> None:
    """Take turns; the controller has tried its rungs before the first."""
    torch.set_num_threads(1)
    workers = [
        _Worker(load_task(asked.task), asked.ladder, fixed, asked.bucket_cap_mb)
        for fixed in (asked.ladder[0], asked.ladder[0], None)
    ]
    for worker in workers[:2]:
        for step in range(_WARM_UP):
            worker.step(step)
    controller = workers[2]
    for step in range((len(asked.ladder) + 2) * 3):
        controller.step(step)
    at_first = _longest(controller.seconds)
    for turn in range(asked.turns):
        for place in range(len(workers)):  # each begins as often as the others
            worker = workers[(place + turn) % len(workers)]
            worker.begin()
            for step in range(asked.steps):
                worker.step(turn * asked.steps + step)
    counted = asked.turns * asked.steps
    found = [_longest(worker.seconds[-counted:]) for worker in workers]
    dense, again, adaptive = (
        [sum(one[first : first + asked.steps]) for first in range(0, counted, asked.steps)] for one in found
    )
    for worker in workers:
        worker.attachment.detach()
    if rank == 0:
        send(Beside(dense, again, adaptive, at_first, controller.rungs[-1]))
    del worker, workers, controller


class _Worker:
    """A model with a compressor, fixed or chosen by a controller, whose steps are timed."""

    def __init__(self, task: LoadedTask, ladder: Sequence[Spec], fixed: Spec | None, bucket_cap_mb: float) -> None:
        self._task = task
        self._ddp = wrap_in_ddp(task.model, "core", bucket_cap_mb)
        self._optimizer = task.optimizer()
        first = ladder[0] if fixed is None else fixed
        self._labels = {make_hook(spec): spec.label for spec in ladder}
        self.attachment = commhooks.attach(self._ddp, make_hook(first), policy=policy_of(first))
        self._controller = Adaptive(self.attachment, list(self._labels)) if fixed is None else None
        self.forget()

    def forget(self) -> None:
        """Begin anew, with the next step as the first."""
        self.seconds: list[float] = []
        self.rungs: list[str] = []
        self.decisions: list[tuple[int, str, str, str]] = []
        self.replacing: list[float] = []
        self.begin()

    def begin(self) -> None:
        """Wait for the other ranks: the next step begins now."""
        dist.barrier()
        if self._controller is not None:
            self._controller.pause()
        self._began = time.perf_counter()

    def step(self, number: int) -> None:
        """Take a step, and time it with all that the controller does after it."""
        batch = self._task.batch(number, dist.get_rank(), dist.get_world_size())
        self.rungs.append(self._labels[self.attachment.compressor])
        self._task.loss(self._ddp, batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._controller is not None:
            self._control(number)
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self._began = now

    def _control(self, number: int) -> None:
        assert self._controller is not None, "called for a controller only"
        began = time.perf_counter()
        decision = self._controller.step()
        if decision is not None:
            self.replacing.append(time.perf_counter() - began)
            self.decisions.append((number + 1, decision.source, decision.target, decision.reason))


def _longest(seconds: Sequence[float]) -> list[float]:
    """Return each step's seconds on the rank where it took longest."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    found: list[float] = times.tolist()
    return found


def _replicas_are_equal(model: nn.Module) -> bool:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, digest.hexdigest())
    return len(set(told)) == 1
