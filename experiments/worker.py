"""The training loop of one rank."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

import commhooks
import ddp_core

from .hooks import make_hook, policy_of
from .launch import Send
from .link import EmulatedLink
from .machine import machine, versions
from .measure import Split, StepClock, WaitClock
from .runs import EvaluationRecord, RunResult, RunSettings, StepRecord
from .tasks import make_task


@dataclass(frozen=True)
class StepDone:
    """Rank 0 finished a step; the loss is its own."""

    run: int
    step: int
    loss: float


@dataclass(frozen=True)
class RunDone:
    """All ranks finished a run."""

    run: int
    result: RunResult


def train_all(rank: int, ranks: int, argument: Sequence[RunSettings], send: Send) -> None:
    """Train all runs in this rank's process; rank 0 sends a StepDone for every step and a RunDone for every run.

    The runs of one task take turns, one step each: any other load on the machine then slows all of them equally, so
    that their times can be compared.
    """
    torch.set_num_threads(1)
    numbered = list(enumerate(argument))
    for _, group in groupby(numbered, key=lambda pair: pair[1].task):
        train_in_turns(dict(group), send if rank == 0 else _silent)
        gc.collect()  # a DDP that outlives its process group may abort the process


def train_in_turns(settings: Mapping[int, RunSettings], send: Send) -> None:
    """Train several runs, a step of each in turn, on the default process group; every rank calls this."""
    runs = {number: _Run(each) for number, each in settings.items()}
    for step in range(max(each.steps for each in settings.values())):
        for number, run in runs.items():
            if step < run.settings.steps:
                send(StepDone(number, step + 1, run.step(step)))
    for number, run in runs.items():
        send(RunDone(number, run.result()))
        run.close()


class _Run:
    """A model in training, and its measurements so far."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.task = make_task(settings.task, settings.size)
        self.model = self.task.model(settings.seed)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.ddp = wrap_in_ddp(self.model, settings.ddp, settings.bucket_cap_mb)
        self.optimizer = self.task.optimizer(self.model)
        waits = WaitClock()
        self.attachment = commhooks.attach(
            self.ddp,
            make_hook(settings.hook, settings.seed),
            policy=policy_of(settings.hook),
            wrap_communicator=lambda inner: waits.around(EmulatedLink(inner, settings.link)),
        )
        self.clock = StepClock(self.model, waits)
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []

    def step(self, step: int) -> float:
        """Take one optimizer step, record its time and bytes, and return this rank's loss."""
        batch = self.task.batch(self.settings.seed, step, self.rank, self.ranks)
        before = self.attachment.statistics()
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.learning_rate(step, self.settings.steps)
        self.clock.begin()
        loss = self.task.loss(self.ddp(batch.inputs), batch.targets)
        loss.backward()
        self.clock.backward_ended()
        self.optimizer.step()
        self.optimizer.zero_grad()
        split, ended = self.clock.end(), time.time()
        after = self.attachment.statistics()
        if (step + 1) % self.settings.evaluate_every == 0 or step + 1 == self.settings.steps:
            self._evaluate(step + 1)
        self.steps.append(_record(step + 1, loss.item(), split, before, after, self.ranks, ended))
        return loss.item()

    def _evaluate(self, step: int) -> None:
        """Evaluate the model on rank 0; the other ranks wait, and the clock is stopped."""
        if self.rank == 0:
            found = self.task.evaluate(self.model)
            self.evaluations.append(EvaluationRecord(step=step, **vars(found)))
        dist.barrier()

    def result(self) -> RunResult:
        """Return the measurements, with the losses averaged over ranks."""
        mean_losses = torch.tensor([record.loss for record in self.steps], dtype=torch.float64)
        dist.all_reduce(mean_losses)
        mean_losses /= self.ranks
        fingerprints: list[str | None] = [None] * self.ranks
        dist.all_gather_object(fingerprints, fingerprint(self.model))
        steps = (replace(record, loss=loss) for record, loss in zip(self.steps, mean_losses.tolist(), strict=True))
        return RunResult(
            settings=self.settings,
            parameters=sum(p.numel() for p in self.model.parameters()),
            description=self.task.description,
            steps=tuple(steps),
            evaluations=tuple(self.evaluations),
            replicas_identical=len(set(fingerprints)) == 1,
            versions=versions(),
            machine=machine(),
        )

    def close(self) -> None:
        """Remove everything from the model; the DDP must go before the process group does."""
        self.clock.remove()
        self.attachment.detach()
        del self.ddp


def wrap_in_ddp(model: nn.Module, ddp: str, bucket_cap_mb: float | None) -> nn.Module:
    """Return the model in ddp_core's class ('core') or in PyTorch's ('torch')."""
    kind = ddp_core.DistributedDataParallel if ddp == "core" else nn.parallel.DistributedDataParallel
    wrapped: nn.Module = kind(model, bucket_cap_mb=bucket_cap_mb)
    return wrapped


def fingerprint(model: nn.Module) -> str:
    """Return a hash of all parameters' bits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _record(
    step: int,
    loss: float,
    split: Split,
    before: commhooks.Statistics,
    after: commhooks.Statistics,
    ranks: int,
    ended: float,
) -> StepRecord:
    """Return a step's split, and the bytes that it added to the attachment's statistics."""
    gradient_bytes = after.gradient_bytes - before.gradient_bytes
    return StepRecord(
        step=step,
        loss=loss,
        **vars(split),
        gradient_bytes=gradient_bytes,
        payload_bytes=after.payload_bytes - before.payload_bytes,
        moved_bytes=after.moved_bytes - before.moved_bytes,
        dense_bytes=2 * (ranks - 1) * gradient_bytes // ranks,
        ended=ended,
    )


def _silent(message: object) -> None:
    """Send nothing: only rank 0 reports."""
