"""Training with gradients that are synchronized every 1, 2, 4 or 8 iterations, with a small and a large batch.

In the iterations between, `no_sync` lets every worker add up its gradients; the optimizer takes a step after each
synchronization, with the mean over the workers of those sums. All intervals train side by side, from the same initial
model and on the same batches, so that they differ in nothing else. The sum over iterations of the workers' mean
gradients is what DDP's `no_sync` gives (`tests/ddp_core/test_accumulation.py`), so one process is enough.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from commhooks.experiments.report.plots import Theme, canvas, legend
from commhooks.experiments.report.words import NEVER, signed, spread_of
from commhooks.experiments.results.intervals import Estimate, differences
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import LoadedTask, load_task
from experiments.studies.blocks import Block, Picture, Table, with_bounds
from experiments.studies.reproduce.comparing import by_seed
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction

_LOSS, _POINTS = partial(signed, form=".3f"), partial(signed, form=".2f")
_OPTIMIZER = "sgd:lr={}"
_ROOM = 1.25  # times the first loss are drawn: one that explodes would flatten all others


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the runs."""

    task: str = "digits:size=tiny"
    batches: tuple[tuple[int, float], ...] = ((8, 0.02), (256, 0.06), (256, 0.5))
    """Images per worker and iteration, and the learning rate, which is the same for every interval."""
    every: tuple[int, ...] = (1, 2, 4, 8)  # iterations from one synchronization to the next; the first is the reference
    iterations: int = 400
    points: int = 50  # of a curve: each is the mean loss of as many iterations
    workers: int = 2
    seeds: int = 5


class Training:
    """One model, whose gradients are synchronized every `every` iterations."""

    def __init__(self, task: LoadedTask, rate: float, every: int) -> None:
        self.task, self.every = task, every
        self.optimizer = task.optimizer(Spec.parse(_OPTIMIZER.format(rate), "optimizer"))
        self.losses: list[float] = []

    def iterate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add the workers' mean gradient to the accumulated ones, and take a step if it is time to synchronize."""
        losses = [self.task.loss(self.task.model, batch) for batch in batches]
        mean = torch.stack(losses).mean()
        mean.backward()  # adds to what is there, the mean over the workers of their gradients
        self.losses.append(mean.item())
        if len(self.losses) % self.every == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return, for each batch size, seed and interval, the loss over the iterations and the held-out results."""
    runs = []
    for batch, rate in settings.batches:
        for seed in range(settings.seeds):
            made = notes.once(f"batch {batch}, rate {rate}, seed {seed}", partial(_train, settings, batch, rate, seed))
            runs += made
            found = ", ".join(f"{run['loss']:.3f} (every {run['every']})" for run in made)
            notes.tell(f"batch {batch}, rate {rate}, seed {seed}: held-out loss {found}")
    return {"runs": runs}


def _train(settings: Settings, batch: int, rate: float, seed: int) -> list[dict[str, Any]]:
    """Return a row for each interval."""
    spec = Spec.parse(settings.task, "task")
    spec = spec if spec.has("batch_size") else spec.having(batch_size=batch)
    tasks = [load_task(spec, seed) for _ in settings.every]
    trained = [Training(task, rate, every) for task, every in zip(tasks, settings.every, strict=True)]
    for iteration in range(settings.iterations):
        batches = [tasks[0].batch(iteration, worker, settings.workers) for worker in range(settings.workers)]
        for one in trained:
            one.iterate(batches)
    reach = settings.iterations // settings.points
    return [
        {
            "batch": batch,
            "rate": rate,
            "seed": seed,
            "every": one.every,
            "curve": [statistics.fmean(one.losses[k : k + reach]) for k in range(0, settings.points * reach, reach)],
            **one.task.evaluate(),
        }
        for one in trained
    ]


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return a table, sentences and a picture for each batch size."""
    blocks: list[Block] = []
    for batch, rate in settings.batches:
        runs = {every: by_seed(measured["runs"], batch=batch, rate=rate, every=every) for every in settings.every}
        title = f"{batch} images per worker, learning rate {rate:g}"
        losses = [loss for of_every in runs.values() for row in of_every.values() for loss in row["curve"]]
        cut = "" if all(loss <= _top(runs) for loss in losses) else " (higher losses are cut off)"
        caption = f"Training loss over the iterations for each interval: {title}{cut}"
        draw = partial(_draw, settings, title, runs)
        blocks += [_table(settings, title, runs), _sentence(settings, batch, rate, runs)]
        blocks.append(Picture(f"loss-batch-{batch}-rate-{rate:g}", caption, draw))
    return blocks


Runs = Mapping[int, Mapping[int, Mapping[str, Any]]]
"""Rows by interval and seed."""


def _table(settings: Settings, title: str, runs: Runs) -> Table:
    columns = (
        "synchronized every",
        "optimizer steps",
        "training loss at the end, nats",
        "held-out loss, nats",
        "difference, nats (95 %)",
        "accuracy, %",
        "difference, points (95 %)",
    )
    more = f"{settings.workers} workers, {settings.iterations} iterations, {settings.seeds} seeds"
    return Table(f"{title}, {more}", columns, [_cells(settings, runs, every) for every in settings.every])


def _cells(settings: Settings, runs: Runs, every: int) -> list[str]:
    own, diverged = runs[every].values(), _diverged(runs, every)
    loss, accuracy = _difference(runs, settings, every, "loss"), _difference(runs, settings, every, "accuracy")
    label = ["iteration" if every == 1 else f"{every} iterations", str(settings.iterations // every)]
    if diverged:
        return [*label, f"{diverged} of {len(own)} runs diverged", *[NEVER] * 4]
    return [
        *label,
        f"{statistics.fmean(row['curve'][-1] for row in own):.3f}",
        f"{statistics.fmean(row['loss'] for row in own):.3f}",
        NEVER if loss is None else with_bounds(loss, _LOSS),
        f"{100 * statistics.fmean(row['accuracy'] for row in own):.2f}",
        NEVER if accuracy is None else with_bounds(accuracy, _POINTS),
    ]


def _diverged(runs: Runs, every: int) -> int:
    """Return how many runs ended with a loss that is not finite; their accuracy means nothing."""
    return sum(not math.isfinite(row["loss"]) for row in runs[every].values())


def _difference(runs: Runs, settings: Settings, every: int, field: str) -> Estimate | None:
    """Return the difference between a result and the first interval's, seed by seed.

    None for the first interval itself, and if a run of either interval diverged.
    """
    if every == settings.every[0] or _diverged(runs, every) or _diverged(runs, settings.every[0]):
        return None
    ours, theirs = ({seed: row[field] for seed, row in runs[n].items()} for n in (every, settings.every[0]))
    scale = 100 if field == "accuracy" else 1
    return Estimate.of({seed: scale * value for seed, value in differences(ours, theirs).items()})


def _sentence(settings: Settings, batch: int, rate: float, runs: Runs) -> str:
    """Return a sentence that compares each interval's held-out loss with the first interval's."""
    first, *others = settings.every
    if diverged := _diverged(runs, first):
        return (
            f"With {batch} images per worker and a learning rate of {rate:g}, {diverged} of {settings.seeds} runs that "
            "synchronize in every iteration diverged, so nothing is compared with them."
        )
    parts = []
    for every in others:
        found = _difference(runs, settings, every, "loss")
        words = f"{_diverged(runs, every)} of {settings.seeds} runs diverged" if found is None else _in_words(found)
        parts.append(f"every {every} iterations, {words}")
    return (
        f"With {batch} images per worker and a learning rate of {rate:g}, held-out loss compared with synchronizing in "
        f"every iteration: {'; '.join(parts)}."
    )


def _in_words(found: Estimate) -> str:
    """Return a difference in held-out loss in words, with its uncertainty."""
    interval = f"({spread_of(found, _LOSS)}, {found.seeds} seeds)"
    if found.sign:
        return f"{abs(found.mean):.3f} {'higher' if found.sign > 0 else 'lower'} {interval}"
    return f"no difference seen {interval}"


def _top(runs: Runs) -> float:
    """Return the highest loss that is drawn."""
    first = [row["curve"][0] for of_every in runs.values() for row in of_every.values()]
    return _ROOM * max(filter(math.isfinite, first), default=1.0)


def _draw(settings: Settings, title: str, runs: Runs, theme: Theme) -> Figure:
    """Draw the training loss over the iterations, mean over the seeds, a curve for each interval."""
    reach = settings.iterations // settings.points
    places = [reach * (point + 0.5) for point in range(settings.points)]
    figure, axes = canvas(f"{title[0].upper()}{title[1:]}", "iteration", 7.0, 3.6)
    for number, every in enumerate(settings.every):
        colour = theme.first if number == 0 else theme.hooks[number - 1]
        curves = zip(*(row["curve"] for row in runs[every].values()), strict=True)
        axes.plot(places, [statistics.fmean(values) for values in curves], color=colour, label=f"every {every}")
    axes.set_ylabel(f"training loss,\nmean of {settings.seeds} seeds")
    axes.set_ylim(0, _top(runs))
    axes.set_xlim(0, settings.iterations)
    legend(figure, axes, width=7.0)
    return figure


REPRODUCTION = Reproduction(
    name="ddp-figure-11",
    title="Loss when gradients are synchronized every 1, 2, 4 or 8 iterations",
    source="PyTorch DDP paper (Li et al., VLDB 2020), figure 11",
    said=(
        "Loss on MNIST over 400 iterations when gradients are synchronized every 1, 2, 4 or 8 iterations.",
        "With a small batch (8 images, learning rate 0.02; recalled), skipping does no harm.",
        "With a large batch (256 images, learning rate 0.06; recalled), the loss ends higher.",
    ),
    sizes={
        "default": Settings(),
        "tiny": Settings(batches=((4, 0.02), (16, 0.06)), iterations=16, points=4, seeds=2),
    },
    measure=measure,
    show=show,
)
