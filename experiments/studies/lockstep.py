"""Training with several workers that live in one process and take turns: no ranks to start, no link to wait for.

All workers hold the same parameters, so one model serves them all: each worker's gradient is computed on its own share
of the batch, the compressor averages the gradients, and the optimizer applies the mean once.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from commhooks import Compressor, Exchanger
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import LoadedTask
from commhooks.language.entries import RESIDUAL
from commhooks.lockstep import average_in_lockstep, lockstep_connections

Gradients = dict[str, Tensor]

_COPIES = 3  # per measured time: a single copy is too short to be reliable


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The outcome of one run; bytes are per worker and step, averaged over the run."""

    loss: float  # on held-out data, after the last step
    accuracy: float | None  # on held-out data, after the last step; None: the task does not count right answers
    payload_bytes: float  # bytes that the worker passed to collectives
    moved_bytes: float  # bytes that it sent for those, as a ring moves them
    gradient_bytes: float
    residual: float | None  # its norm relative to the last gradient's, over all workers; None without residuals
    diverged: int | None  # the first step whose loss was not finite, which ends the run; None if all were
    vnmse: float  # of the first step


@dataclass(frozen=True)
class Score:
    """The measure by which a task is judged."""

    name: str
    field: str  # of Trained
    higher_is_better: bool
    scale: float  # of a difference, in `unit`
    unit: str

    def of(self, run: Trained) -> float:
        """Return the score of a run."""
        return float(getattr(run, self.field))


ACCURACY = Score("accuracy", "accuracy", higher_is_better=True, scale=100, unit="points")
LOSS = Score("validation loss", "loss", higher_is_better=False, scale=1, unit="nats")
SCORES = {"digits": ACCURACY, "gpt": LOSS, "lstm": LOSS}
"""The score of each task of the leaderboard; text has its loss, because a good prediction often guesses wrong bytes."""


def train_in_lockstep(
    task: LoadedTask, compressor: Compressor, *, steps: int, workers: int, optimizer: Spec | None = None
) -> Trained:
    """Train the task's model, in place, for `steps` steps with its own or another optimizer, and return the outcome.

    Raises:
        CommHooksError: The compressor does not accept the model's parameters, or fails.
        ValueError: The workers do not end a step with the same mean, so that one model cannot represent all.

    """
    model = task.model
    exchangers = join_workers(model, compressor, workers)
    made = task.optimizer(optimizer)
    gradients, diverged, first = list[Gradients](), None, math.nan
    for step in range(steps):
        task.set_learning_rate(made, step, steps)
        losses, gradients = own_gradients(task, step, workers)
        means = [_copies(own) for own in gradients] if step in {0, steps - 1} else gradients
        average_in_lockstep(exchangers, means)
        if step in {0, steps - 1}:
            _check_agreement(means)
        if step == 0:
            first = vnmse(means[0], gradients)
        for name, parameter in model.named_parameters():
            parameter.grad = means[0][name]
        made.step()
        if not math.isfinite(sum(losses)):
            diverged = step + 1
            break
    judged, sent = task.evaluate(), exchangers[0].statistics()
    return Trained(
        loss=judged["loss"],
        accuracy=judged.get("accuracy"),
        payload_bytes=sent.payload_bytes / sent.steps,
        moved_bytes=sent.moved_bytes / sent.steps,
        gradient_bytes=sent.gradient_bytes / sent.steps,
        residual=_residual(exchangers, gradients),
        diverged=diverged,
        vnmse=first,
    )


def vnmse(received: Gradients, gradients: Sequence[Gradients]) -> float:
    """Return the normalised squared error of a round: |received - mean|² / |mean|², over all parameters.

    This is vNMSE, defined by Vargaftik et al., "DRIVE: One-bit Distributed Mean Estimation", NeurIPS 2021, for one
    vector and its received form; here the vector is the mean of the workers' gradients, computed in fp64. If that mean
    is zero, vNMSE is 0 if zeros are received, and inf otherwise.
    """
    means = {name: torch.stack([own[name].double() for own in gradients]).mean(0) for name in received}
    size = _norm(means.values())
    error = _norm(one.double() - means[name] for name, one in received.items())
    return (error / size) ** 2 if size else math.inf if error else 0.0


def join_workers(model: nn.Module, compressor: Compressor, workers: int) -> list[Exchanger]:
    """Return an exchanger for each worker, for the gradients of the model."""
    like = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return [Exchanger(like, compressor, connection=connection) for connection in lockstep_connections(workers)]


def own_gradients(task: LoadedTask, step: int, workers: int) -> tuple[list[float], list[Gradients]]:
    """Return each worker's loss and gradients, on its own share of the step's batch."""
    named = dict(task.model.named_parameters())
    losses, gradients = [], []
    for worker in range(workers):
        loss = task.loss(task.model, task.batch(step, worker, workers))
        gradients.append(dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True)))
        losses.append(loss.item())
    return losses, gradients


def time_in_lockstep(
    task: LoadedTask, compressor: Compressor, *, workers: int, rounds: int, warm_up: int = 2
) -> Spread:
    """Return the time for one worker to compress and decompress a gradient, relative to copying it.

    In every round the workers average the gradients of the untrained model, and the copy is timed right afterwards.
    """
    exchangers = join_workers(task.model, compressor, workers)
    _, gradients = own_gradients(task, 0, workers)
    whole = torch.cat([gradient.flatten() for gradient in gradients[0].values()])
    room, ratios = torch.empty_like(whole), []
    for _ in range(warm_up + rounds):
        average_in_lockstep(exchangers, [_copies(own) for own in gradients])
        seconds = statistics.fmean(exchanger.last_step().seconds_compressing for exchanger in exchangers)
        begun = time.perf_counter()
        for _ in range(_COPIES):
            room.copy_(whole)
        ratios.append(seconds * _COPIES / (time.perf_counter() - begun))
    return Spread.of(ratios[warm_up:])


def _copies(gradients: Gradients) -> Gradients:
    return {name: gradient.clone() for name, gradient in gradients.items()}


def _check_agreement(means: Sequence[Gradients]) -> None:
    """Raise ValueError if a worker has a different mean, bit for bit; NaN counts as equal to NaN."""
    for own in means[1:]:
        for name, mean in own.items():
            if not torch.equal(mean.nan_to_num(nan=0.0), means[0][name].nan_to_num(nan=0.0)):
                raise ValueError(f"the workers' means of {name!r} differ: this compressor does not exchange everything")


def _residual(exchangers: Sequence[Exchanger], gradients: Sequence[Gradients]) -> float | None:
    """Return the norm of all workers' residuals over the norm of their gradients; None without residuals."""
    local = [own for exchanger in exchangers for own in exchanger.state_dict()["local"].values()]
    residuals = [entries[RESIDUAL] for own in local for entries in own.values() if RESIDUAL in entries]
    norm = _norm(gradient for own in gradients for gradient in own.values())
    return (_norm(residuals) / norm if norm else math.inf) if residuals else None


def _norm(parts: Iterable[Tensor]) -> float:
    return math.hypot(*(part.norm().item() for part in parts))
