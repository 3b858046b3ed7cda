"""The work of the ranks of `control-link`: steps on a link that changes, and steps in turns on one that does not."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import nn

import commhooks
from commhooks.control import Adaptive
from commhooks.experiments.hooks import make_hook, policy_of
from commhooks.experiments.launch import Send, Tell
from commhooks.experiments.links.link import LinkSettings, parse_rate
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.experiments.training.stepper import Stepper
from commhooks.experiments.training.worker import fingerprint
from experiments.studies.ranks import UNLIMITED_HOSTS, NewRate
from experiments.studies.turns import on_slowest, rotated, turns_of

_WARM_UP = 3  # steps that are not counted: memory is allocated, and the DDP rebuilds its buckets


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the runs, and the rates of the link."""

    limited: bool = True  # False: a trial of the code, without hosts whose link could change
    rates: tuple[str, ...] = ("1Gbit/s", "100Mbit/s", "1Gbit/s")
    steps: int = 100  # of a phase, with the controller
    fixed_steps: int = 25  # of a phase, with a fixed compressor
    runs: int = 2  # of the controller
    candidates: tuple[str, ...] = ("all-reduce", "fp16", "int8", "top-k:ratio=0.01")
    task: str = "gpt:size=medium,width=96,heads=4,layers=8,batch_size=20"
    bucket_cap_mb: float = 0.5
    turns: int = 10  # of the controller beside a plain all-reduce, without a limit
    turn_steps: int = 15

    @property
    def link(self) -> LinkSettings | None:
        """The link between the ranks, which changes unless it is the loopback (None)."""
        return UNLIMITED_HOSTS if self.limited else None


@dataclass(frozen=True)
class Ran:
    """The outcome of a run, on rank 0."""

    seconds: list[float]  # of each step, on the rank where it took longest
    rungs: list[str]  # the compressor of each step
    decisions: list[tuple[int, str, str, str]]  # step, from, to, reason
    replacing: list[float]  # seconds of each step's call of the controller in which it moved
    equal: bool  # whether the replicas were equal, bit for bit, after every phase


def run_phases(settings: Settings, fixed: Spec | None, send: Send) -> Ran:
    """Take the steps of all phases, with one compressor or, for None, with the controller.

    Rank 0 asks for each phase's rate when its first step begins.
    """
    worker = _Worker(settings, fixed)
    for _ in range(_WARM_UP if fixed is not None else 0):
        worker.step()
    worker.forget()
    equal = True
    for rate in settings.rates:
        send(NewRate(parse_rate(rate)))
        for _ in range(settings.steps if fixed is None else settings.fixed_steps):
            worker.step()
        equal = equal and _replicas_are_equal(worker.model)
        dist.barrier()
    seconds = on_slowest(worker.seconds)
    worker.attachment.close()
    return Ran(seconds, worker.rungs, worker.decisions, worker.replacing, equal)


@dataclass(frozen=True)
class Beside:
    """Seconds of each turn's steps, on the rank where they took longest."""

    dense: list[float]
    again: list[float]  # of a second plain all-reduce: what turns differ by without any cause
    adaptive: list[float]
    at_first: list[float]  # of the controller's steps before the first turn, while it tried its candidates
    chosen: str


def run_turns(settings: Settings, tell: Tell) -> Beside:
    """Take turns of some steps; the controller tried its candidates before the first."""
    plain = Spec.parse(settings.candidates[0])
    workers = {name: _Worker(settings, one) for name, one in {"dense": plain, "again": plain, "adaptive": None}.items()}
    controller = workers["adaptive"]
    for worker in workers.values():
        for _ in range((len(settings.candidates) + 2) * 3 if worker is controller else _WARM_UP):
            worker.step()
    at_first = on_slowest(controller.seconds)
    turns = {name: partial(worker.turn, settings.turn_steps) for name, worker in workers.items()}
    taken = turns_of(turns, settings.turns, order=rotated)
    for worker in workers.values():
        worker.attachment.close()
    seconds = {name: [sum(on_slowest(turn)) for turn in own] for name, own in taken.items()}
    return Beside(**seconds, at_first=at_first, chosen=controller.rungs[-1])


class _Worker:
    """A model with a compressor, fixed or chosen by a controller, whose steps are timed."""

    def __init__(self, settings: Settings, fixed: Spec | None) -> None:
        task = load_task(Spec.parse(settings.task, "task"))
        self.model = task.model
        self._stepper = Stepper(task, wrap_in_ddp(task.model, "core", settings.bucket_cap_mb))
        candidates = list(map(Spec.parse, settings.candidates))
        first = candidates[0] if fixed is None else fixed
        self._labels = {make_hook(spec): spec.label for spec in candidates}
        self.attachment = commhooks.attach(self._stepper.ddp, make_hook(first), policy=policy_of(first))
        self._controller = Adaptive(self.attachment, list(self._labels)) if fixed is None else None
        self.forget()

    def forget(self) -> None:
        """Drop all records: the next step is the first."""
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

    def step(self) -> None:
        """Take a step, and time it with all that the controller does after it."""
        self.rungs.append(self._labels[self.attachment.compressor])
        self._stepper()
        if self._controller is not None:
            began = time.perf_counter()
            decision = self._controller.step()
            if decision is not None:
                self.replacing.append(time.perf_counter() - began)
                number = len(self.seconds) + 1
                self.decisions.append((number, decision.source, decision.target, decision.reason))
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self._began = now

    def turn(self, steps: int) -> list[float]:
        """Take `steps` steps, which begin on all ranks together, and return their seconds."""
        self.begin()
        for _ in range(steps):
            self.step()
        return self.seconds[-steps:]


def _replicas_are_equal(model: nn.Module) -> bool:
    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, fingerprint(model))
    return len(set(told)) == 1
