"""The training loop of one rank."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

import commhooks
import ddp_core
from experiments.hooks import make_hook
from experiments.launch import Send
from experiments.link import EmulatedLink
from experiments.machine import machine, versions
from experiments.measure import Split, StepClock, WaitClock
from experiments.runs import EvaluationRecord, RunResult, RunSettings, StepRecord
from experiments.tasks import Task, make_task


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
    """Train every run in turn in this rank's process; rank 0 sends a StepDone per step and a RunDone per run."""
    torch.set_num_threads(1)
    for number, settings in enumerate(argument):
        result = train(settings, send if rank == 0 else _silent, number)
        if rank == 0:
            send(RunDone(number, result))
        gc.collect()


def train(settings: RunSettings, send: Send, number: int = 0) -> RunResult:
    """Train one model on the default process group; every rank calls this, and every rank gets the result."""
    task = make_task(settings.task, settings.size)
    model = task.model(settings.seed)
    run = _Run(settings, task, model)
    try:
        for step in range(settings.steps):
            loss = run.step(step)
            send(StepDone(number, step + 1, loss))
            if (step + 1) % settings.evaluate_every == 0 or step + 1 == settings.steps:
                run.evaluate(step + 1)
        return run.result()
    finally:
        run.close()


class _Run:
    """A model in training, and what was noted about it so far."""

    def __init__(self, settings: RunSettings, task: Task, model: nn.Module) -> None:
        self.settings = settings
        self.task = task
        self.model = model
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.ddp = wrap_in_ddp(model, settings.ddp, settings.bucket_cap_mb)
        self.optimizer = task.optimizer(model)
        waits = WaitClock()
        self.attachment = commhooks.attach(
            self.ddp,
            make_hook(settings.hook, settings.seed),
            wrap_communicator=lambda inner: waits.around(EmulatedLink(inner, settings.link)),
        )
        self.clock = StepClock(model, waits)
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []

    def step(self, step: int) -> float:
        """Take one optimizer step, note its time and bytes, and return this rank's loss."""
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
        split = self.clock.end()
        after = self.attachment.statistics()
        self.steps.append(_record(step + 1, loss.item(), split, before, after, self.ranks))
        return loss.item()

    def evaluate(self, step: int) -> None:
        """Judge the model on rank 0; the others wait, and no clock runs."""
        if self.rank == 0:
            found = self.task.evaluate(self.model)
            self.evaluations.append(EvaluationRecord(step=step, **vars(found)))
        dist.barrier()

    def result(self) -> RunResult:
        """Return what was noted, with the losses averaged over ranks."""
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
        """Take everything off the model; DDP goes before the process group does."""
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
    step: int, loss: float, split: Split, before: commhooks.Statistics, after: commhooks.Statistics, ranks: int
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
    )


def _silent(message: object) -> None:
    """Send nothing: only rank 0 reports."""
