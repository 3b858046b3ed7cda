"""The accuracy that compressors cost: differences from dense all-reduce, as the leaderboard measured them.

The file `accuracy.json` beside this one is written by `commhooks leaderboard --accuracy`. Its tasks are small and
trained for a few hundred steps. It shows which compressors cost nothing there, not what they cost elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from commhooks.language.compressor import Compressor

from .. import stored

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
    differences: tuple[Difference, ...]


@dataclasses.dataclass(frozen=True)
class Loss:
    """One compressor's cost in accuracy on one task."""

    task: str
    unit: str
    difference: Difference
    is_safe: bool
    """True if even the worse end of the interval is no worse than dense all-reduce with another seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accuracy:
    """All tasks that were measured, and how."""

    tasks: tuple[TaskAccuracy, ...]
    workers: int
    command: str
    machine: str
    versions: Mapping[str, str]

    def losses_of(self, compressor: Compressor) -> tuple[Loss, ...]:
        """Return what a compressor cost on each task on which exactly these settings were measured."""
        return tuple(
            Loss(task.task, task.unit, one, _is_safe(task, one))
            for task in self.tasks
            for one in task.differences
            if one.compressor == str(compressor)
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
        try:
            return stored.read(cls, path, form=FORMAT)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"accuracy {path}: expected a file of format {FORMAT} that 'commhooks leaderboard --accuracy' wrote "
                f"({type(error).__name__}: {error}); write it again"
            ) from error


def _is_safe(task: TaskAccuracy, one: Difference) -> bool:
    if one.low is None or one.high is None:
        return False
    worst = -one.low if task.higher_is_better else one.high
    return worst <= task.seed_range
