"""The runs of an ablation: variants of a hook, trained on the same tasks, with the same data and initial models.

Every run trains several workers in one process (`experiments.studies.lockstep`), so what comes out does not depend
on time or on a link. Runs with the same seed differ in nothing but the hook.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commhooks.experiments.hooks import make_hook
from commhooks.experiments.machine import cores
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from experiments.studies.jobs import run_jobs
from experiments.studies.lockstep import Trained, train_in_lockstep
from experiments.studies.reproduce.notes import Notes


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """The settings of an ablation."""

    tasks: tuple[str, ...]
    """Tasks as on the command line: 'digits:size=small,steps=80', and with another optimizer than the task's own:
    'gpt:size=tiny under sgd:lr=0.1,momentum=0.9'. Each run takes the task's own number of steps."""
    variants: Mapping[str, str]
    """Hooks by label: {"PowerSGD rank 2": "powersgd:rank=2"}, the dense baseline first."""
    seeds: int = 5
    """Higher: narrower intervals."""
    workers: int = 4
    """Higher: more gradients in a mean, each of a batch of the task's size."""
    processes: int = 0
    """The number of runs at a time; 0: one for each core."""

    def __post_init__(self) -> None:
        for name, least in (("seeds", 2), ("workers", 2), ("processes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least} (got {getattr(self, name)})")
        if len(self.variants) < 2 or not self.tasks:
            raise ValueError("nothing to compare: name at least one task and two variants")

    @property
    def baseline(self) -> str:
        """The label of the first variant, with which the others are compared."""
        return next(iter(self.variants))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run to be made; where it is sent to, it makes its model itself."""

    task: str
    variant: str
    hook: str
    seed: int
    workers: int

    @property
    def key(self) -> str:
        """The text that identifies the run."""
        return f"{self.task} · {self.variant} ({self.hook}) · seed {self.seed}"

    def run(self) -> dict[str, Any]:
        """Train, and return a row of the results; a number that is not finite becomes None."""
        named, optimizer = task_and_optimizer(self.task)
        task = load_task(named, self.seed)
        hook = make_hook(Spec.parse(self.hook), self.seed)
        trained = train_in_lockstep(task, hook, steps=task.steps, workers=self.workers, optimizer=optimizer)
        return as_row(trained, key=self.key, task=self.task, variant=self.variant, seed=self.seed, steps=task.steps)


def task_and_optimizer(text: str) -> tuple[Spec, Spec | None]:
    """Return the task and the optimizer of 'gpt under sgd:lr=0.1'; None: the task's own."""
    task, _, optimizer = text.partition(" under ")
    return Spec.parse(task, "task"), Spec.parse(optimizer, "optimizer") if optimizer else None


def train_variants(ablation: Ablation, notes: Notes) -> dict[str, Any]:
    """Train every variant on every task with every seed, and return a row for each run, in that order, under "runs".

    Runs that an interrupted command finished are not made again.

    Raises:
        ValueError: A task or a hook cannot be made.
        WorldError: A run failed.

    """
    for task in ablation.tasks:  # a mistake is an error before the first run, not after an hour
        named, optimizer = task_and_optimizer(task)
        load_task(named).optimizer(optimizer)
        for hook in ablation.variants.values():
            make_hook(Spec.parse(hook))
    return {"runs": rows_of(ablation, Trial, notes)}


def rows_of(ablation: Ablation, kind: type[Trial], notes: Notes) -> list[dict[str, Any]]:
    """Return the rows of an ablation's runs: of all variants on all tasks with all seeds; see `train_variants`."""
    trials = [
        kind(task=task, variant=label, hook=hook, seed=seed, workers=ablation.workers)
        for task in ablation.tasks
        for label, hook in ablation.variants.items()
        for seed in range(ablation.seeds)
    ]
    rows: dict[str, Any] = {trial.key: notes.get(trial.key) for trial in trials}
    missing = [trial for trial in trials if rows[trial.key] is None]

    def keep(row: Any) -> None:
        rows[row["key"]] = row
        notes.keep(row["key"], row, _in_words(row))

    if missing:
        run_jobs(missing, min(ablation.processes or cores(), len(missing)), keep)
    return list(rows.values())


def as_row(trained: Trained, **known: Any) -> dict[str, Any]:
    """Return what is known of a run and what came out; a number that is not finite becomes None."""
    outcome = dataclasses.asdict(trained).items()
    return known | {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in outcome
    }


def _in_words(row: Mapping[str, Any]) -> str:
    if row["loss"] is None:
        return "diverged"
    accuracy = "" if row["accuracy"] is None else f", accuracy {row['accuracy']:.3f}"
    return f"loss {row['loss']:.3f}{accuracy}"
