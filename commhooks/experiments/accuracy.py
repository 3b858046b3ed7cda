"""The accuracy that compressors cost: differences from dense all-reduce, as the leaderboard measured them.

The file `accuracy.json` beside this one is written by the study `leaderboard`. Its tasks are small and
trained for a few hundred steps. It shows which compressors cost nothing there, not what they cost elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from commhooks.experiments import stored
from commhooks.experiments.advice import BASELINE, Cost, cost_of_diloco
from commhooks.experiments.results.verdicts import USUAL
from commhooks.experiments.specs import Spec, is_diloco, steps_of_a_round
from commhooks.making import compressor_in_file

FILE = Path(__file__).with_name("accuracy.json")
FORMAT = 1  # of the file; increased when readers must change


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between a compressor's score and dense all-reduce's, over the same seeds."""

    compressor: str
    """Its `str`, from which `commhooks.make_compressor` builds it."""
    mean: float | None
    """The mean difference, in the task's unit; None if a run diverged."""
    low: float | None
    """Lower end of the 95 % interval."""
    high: float | None
    """Upper end of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskAccuracy:
    """The differences of all compressors on one task."""

    task: str
    description: str
    score: str
    """The compared quantity, such as "validation loss"."""
    unit: str
    """The unit of differences, such as "nats"."""
    higher_is_better: bool
    steps: int
    seeds: int
    seed_range: float
    """The distance between dense all-reduce's best and worst seeds; a smaller difference cannot be told from chance."""
    fall: float
    """By how much dense all-reduce's score is better than a guess; a difference above 1 % of it matters."""
    differences: tuple[Difference, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accuracy:
    """All tasks that were measured, and how."""

    tasks: tuple[TaskAccuracy, ...]
    workers: int
    command: str
    machine: str
    versions: Mapping[str, str]

    def costs_of(self, hook: str) -> tuple[Cost, ...]:
        """Return what a hook in text form cost on each task; nothing if these settings were not measured."""
        spec = Spec.parse(hook)
        if is_diloco(spec):
            given = dict(spec.settings)
            return cost_of_diloco(str(given.get("compressor", BASELINE)), steps_of_a_round(spec))
        try:
            compressor = compressor_in_file(str(spec.having(policy=None, start_after=None)))
        except (ValueError, TypeError):  # PyTorch's hook, or a compressor of the user's, which a name never imports
            return ()
        return tuple(
            _cost(task, one) for task in self.tasks for one in task.differences if one.compressor == str(compressor)
        )

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        stored.write(self, path, form=FORMAT)

    @classmethod
    def read(cls, path: Path = FILE) -> Accuracy:
        """Return the differences in a file; by default in the one that comes with this package.

        Raises:
            ValueError: There is no such file, or it does not hold differences of this format.

        """
        return stored.read_of(cls, path, form=FORMAT, what="accuracy", by="the leaderboard")


def _cost(task: TaskAccuracy, one: Difference) -> Cost:
    unit, margin = f"{task.unit} on {task.task}", USUAL.matters * task.fall
    if one.mean is None or one.low is None or one.high is None:
        return Cost(math.inf, math.inf, margin, unit)
    return Cost(-one.mean, -one.low, margin, unit) if task.higher_is_better else Cost(one.mean, one.high, margin, unit)
