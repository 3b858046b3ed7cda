"""The folder of runs: one file for each finished run. Nothing is deleted unless asked for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .runs import PARTIAL, RunResult, RunSettings
from .summary import smoothed_losses, total_bytes, total_seconds

if TYPE_CHECKING:
    import pandas

RESULTS = "results"


def finished(out: Path, runs: Iterable[RunSettings], sources: dict[str, str]) -> dict[RunSettings, RunResult]:
    """Return the results of those runs that are finished already.

    Args:
        out: The folder given by --out.
        runs: What is to be run.
        sources: For each task, by label, the hash of its function's file.

    Raises:
        ValueError: A result is damaged, or was made with another version of the task's file.

    """
    found: dict[RunSettings, RunResult] = {}
    for settings in runs:
        path = out / RESULTS / f"{settings.name}.json"
        if not path.is_file():
            continue
        result = RunResult.read(path)
        if result.settings != settings:
            raise ValueError(f"{path} holds the run of other settings than its name says; move it away")
        if result.source != sources.get(settings.task.label, result.source):
            raise ValueError(
                f"the file of task {settings.task.label!r} has changed since {path} was made; name another folder with "
                "--out, or replace the results with --overwrite"
            )
        found[settings] = result
    return found


def read_results(folders: Sequence[Path]) -> list[RunResult]:
    """Return all results in these folders, each a command's --out or its folder `results`, in order of their names.

    A run that is in several folders is returned once.

    Raises:
        ValueError: A folder has no results, or a file in it is damaged.

    """
    found: dict[RunSettings, RunResult] = {}
    for folder in folders:
        place = folder / RESULTS if (folder / RESULTS).is_dir() else folder
        paths = sorted(place.glob("*.json")) if place.is_dir() else []
        if not paths:
            raise ValueError(f"{folder} holds no results: expected a folder written by compare, sweep or run")
        for path in paths:
            result = RunResult.read(path)
            found.setdefault(result.settings, result)
    return list(found.values())


def load_table(*folders: str | Path, steps: bool = False) -> pandas.DataFrame:
    """Load the results of any number of folders into one pandas table.

    Args:
        folders: Each is a command's --out, or its folder `results`.
        steps: Return a row for each step instead of one for each run.

    Returns:
        A table whose first columns are the run's settings, as on the command line (task, hook, optimizer, ranks, steps,
        seed, link, compute, ddp, bucket_cap_mb, evaluate_every). Then, for each run: held_out_loss and other metrics
        after the last step, train_loss (mean of the last ten steps), seconds and moved_bytes (totals), median_step_seconds,
        ratio (dense bytes over moved bytes), replicas_identical, parameters, dilation. For each step: the fields of
        `StepRecord`.

    Raises:
        ValueError: A folder has no results, or a file in it is damaged.
        ImportError: pandas is not installed.

    """
    import pandas

    rows: list[dict[str, object]] = []
    for result in read_results([Path(folder) for folder in folders]):
        settings = {name: _plain(value) for name, value in vars(result.settings).items()}
        settings["run_steps" if steps else "steps"] = settings.pop("steps")
        if steps:
            rows += [settings | vars(step) for step in result.steps]
        else:
            rows.append(settings | _outcome(result))
    return pandas.DataFrame(rows)


def _plain(value: object) -> object:
    return getattr(value, "label", value)


def _outcome(result: RunResult) -> dict[str, object]:
    steps, last = result.steps, result.evaluations[-1]
    seconds, moved = total_seconds(steps), total_bytes(steps)
    return {
        "held_out_loss": last.loss,
        **{f"held_out_{name}": value for name, value in last.metrics.items()},
        "train_loss": smoothed_losses(steps)[-1],
        "seconds": seconds,
        "median_step_seconds": statistics.median(step.seconds for step in steps),
        "moved_bytes": moved,
        "ratio": sum(step.dense_bytes for step in steps) / moved if moved else math.inf,
        "replicas_identical": result.replicas_identical,
        "parameters": result.parameters,
        "dilation": result.dilation,
    }


def remove_partial(out: Path) -> None:
    """Remove what a process that was killed while it wrote a result left behind."""
    for path in (out / RESULTS).glob(f"*{PARTIAL}"):
        path.unlink()
