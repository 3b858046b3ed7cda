"""The folder of runs: one file for each finished run. Nothing is deleted unless asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commhooks.experiments.results.summary import Typical, smoothed_losses, total_bytes, total_seconds, typical_steps
from commhooks.experiments.runs import PARTIAL, RunResult, RunSettings
from commhooks.experiments.tasks.loading import source_of
from commhooks.language.text import Spelling
from commhooks.making import kind_of
from commhooks.saving.files import json_in, named

if TYPE_CHECKING:
    import pandas

RESULTS = "results"
FAILURES = "failures"
HEAD = "commhooks: a run that failed\n"  # how the text of a failure begins


def sources_of(runs: Iterable[RunSettings]) -> dict[str, str]:
    """Return a dict from each task's label to the hash of its function's file, which is empty for built-in tasks."""
    return {task.label: source_of(task) for task in {settings.task: None for settings in runs}}


def finished(out: Path, runs: Iterable[RunSettings], sources: Mapping[str, str]) -> dict[RunSettings, RunResult]:
    """Return the results of the runs that are already finished.

    Args:
        out: The folder given by --out.
        runs: The requested runs.
        sources: The hashes that `sources_of` returns.

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
            raise ValueError(f"{path} holds the run of other settings than its name says; move it away, and run again")
        if result.source != sources.get(settings.task.label, result.source):
            raise ValueError(
                f"the file of task {settings.task.label!r} has changed since {path} was made, so that its results and "
                "new ones cannot be compared; name another folder with --out, replace the folder's results with "
                "--overwrite, or move those of this task away"
            )
        found[settings] = result
    return found


def write_failure(out: Path, settings: RunSettings, traceback: str) -> Path:
    """Write a failed run's traceback into `out`/failures, and return the path."""
    path = _failure_file(out, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    with named(path):
        path.write_text(f"{HEAD}{json.dumps(settings.to_dict())}\n\n{traceback}\n", encoding="utf-8")
    return path


def remove_failure(out: Path, settings: RunSettings) -> None:
    """Remove the file that `write_failure` wrote about a run, which has succeeded since."""
    _failure_file(out, settings).unlink(missing_ok=True)


def read_failures(folders: Sequence[Path]) -> dict[RunSettings, str]:
    """Return the tracebacks of all runs that failed, in these folders, each a command's --out.

    Raises:
        ValueError: A file among them is damaged.

    """
    found = {}
    for path in (path for folder in folders for path in sorted((folder / FAILURES).glob("*.txt"))):
        head, settings, _, traceback = (*path.read_text(encoding="utf-8").split("\n", 3), "", "", "")[:4]
        try:
            if f"{head}\n" != HEAD:
                raise ValueError(f"it must begin with {HEAD!r}")
            found[RunSettings.from_dict(json_in(settings))] = traceback
        except ValueError as error:
            raise ValueError(f"{path} is not the record of a failed run ({error}); move it away") from error
    return found


def _failure_file(out: Path, settings: RunSettings) -> Path:
    return out / FAILURES / f"{settings.name}.txt"


def read_results(folders: Sequence[Path]) -> list[RunResult]:
    """Return all results in these folders, each a command's --out or its folder `results`, the earliest run first.

    A run that is in several folders is returned once.

    Raises:
        ValueError: A folder has no results, or a file in it is damaged.

    """
    found: dict[RunSettings, RunResult] = {}
    for folder in folders:
        place = folder / RESULTS if (folder / RESULTS).is_dir() else folder
        paths = sorted(place.glob("*.json")) if place.is_dir() else []
        if not paths:
            raise ValueError(f"{folder} holds no results: expected a folder written by compare or sweep")
        for path in paths:
            result = RunResult.read(path)
            found.setdefault(result.settings, result)
    return sorted(found.values(), key=lambda result: result.steps[0].ended)


def read_readable(out: Path) -> tuple[list[RunResult], list[str]]:
    """Return the results in a command's folder, the earliest run first, and a sentence about each other file."""
    found, left_out = [], []
    for path in sorted((out / RESULTS).glob("*.json")):
        try:
            found.append(RunResult.read(path))
        except ValueError as error:
            left_out.append(f"left out of the report: {error}")
    return sorted(found, key=lambda result: result.steps[0].ended), left_out


def load_table(*folders: str | Path, steps: bool = False) -> pandas.DataFrame:
    """Load the results of any number of folders into one pandas table.

    Args:
        folders: Each is a command's --out, or its folder `results`. A run found in several of them has one row.
        steps: Return a row for each step instead of one for each run.

    Returns:
        A table whose first columns are the run's settings, as text and numbers like on the command line: `task`,
        `hook`, `optimizer`, `ranks`, `seed`, `link`, `compute`, `ddp`, `bucket_cap_mb` (MiB), `evaluate_every` and
        `steps` (with `steps=True`: `run_steps`). `optimizer`, `compute` and `bucket_cap_mb` are missing (NaN) if the
        task's, this machine's or the DDP's own were used. `hook_name` is the hook without its settings. Each setting
        that any of the hooks names (`rank`, `error_feedback`) is a column too; hooks that take it and do not name it
        have its default. A setting whose name is taken has `hook_` before it.

        Then, for each run, about the steps asked for: `held_out_loss` and other metrics after the last of them
        (`held_out_accuracy`, 0 to 1); `train_loss`, the mean of the last ten; `seconds` of training; `step_seconds`,
        the interquartile mean of the steps that were not probed (with DiLoCo, of the mean steps of its rounds), and its
        parts, `compute_seconds`, `compression_seconds` and `waiting_seconds`; `moved_bytes`, the bytes that a rank
        sent, as a ring moves them; `interface_bytes`, the same as counted by the host's network interface,
        or NaN; `ratio`, the bytes of a plain all-reduce over `moved_bytes`. A run may have gone on after these steps:
        `all_steps`, `all_seconds` and `last_held_out_loss` describe its end. `replicas_identical`: True if all ranks
        ended with the same parameters; `parameters`, their number; `time_scale`, seconds here for one second in the
        table, above or below 1 if compute was stated.

        For each step: the fields of `commhooks.experiments.runs.StepRecord`; names of times end with their unit, as in
        `waiting_seconds`.

    Raises:
        ValueError: A folder has no results, or a file in it is damaged.
        ImportError: pandas is not installed.

    """
    return table_of(read_results([Path(folder) for folder in folders]), steps=steps)


# A setting is called `compute` too.
_STEP_COLUMNS = {name: f"{name}_seconds" for name in ("compute", "compression", "waiting", "hidden")}


def table_of(results: Iterable[RunResult], *, steps: bool = False) -> pandas.DataFrame:
    """Return the table that `load_table` describes."""
    import pandas

    rows: list[dict[str, object]] = []
    results = list(results)
    named = list(dict.fromkeys(key for result in results for key, _ in result.settings.hook.settings))
    for result in results:
        settings = {name: _plain(value) for name, value in vars(result.settings).items()}
        own = _defaults(result.settings.hook.name) | dict(result.settings.hook.settings)
        settings["run_steps" if steps else "steps"] = settings.pop("steps")
        settings["hook_name"] = result.settings.hook.name
        figures = [_outcome(result)]
        if steps:
            figures = [{_STEP_COLUMNS.get(key, key): value for key, value in vars(one).items()} for one in result.steps]
        taken = {*settings, *figures[0]}
        settings |= {f"hook_{key}" if key in taken else key: _plain(own.get(key)) for key in named}
        rows += [settings | one for one in figures]
    table = pandas.DataFrame(rows)
    for name in (f"hook_{key}" if key in taken else key for key in named if rows):
        table[name] = table[name].convert_dtypes()  # a rank stays whole beside hooks without one
    # A column without any value would otherwise have the type `object`.
    types = {"optimizer": "str", "compute": "str", "bucket_cap_mb": "float", "interface_bytes": "float"}
    return table.astype({name: kind for name, kind in types.items() if name in table})


def _defaults(hook: str) -> dict[str, object]:
    """Return the defaults of a hook's settings; nothing for one that is not known here."""
    try:
        found = kind_of(hook, imports=False)
    except ValueError:
        return {}
    return {"start_after": 0, "error_feedback": found.feeds_back} | found.defaults()


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Spelling) else getattr(value, "label", value)


def _outcome(result: RunResult) -> dict[str, object]:
    steps, last, typical = result.asked_steps, result.evaluation, Typical.of(typical_steps(result))
    moved, counted = total_bytes(steps), [step.interface_bytes for step in steps]
    return {
        "held_out_loss": last.loss,
        **{f"held_out_{name}": value for name, value in last.metrics.items()},
        "train_loss": smoothed_losses(steps)[-1],
        "seconds": total_seconds(steps),
        "step_seconds": typical.seconds,
        **{f"{part}_seconds": seconds for part, seconds in vars(typical).items()},
        "moved_bytes": moved,
        "interface_bytes": None if None in counted else sum(number or 0 for number in counted),
        "ratio": sum(step.dense_bytes for step in steps) / moved if moved else math.inf,
        "all_steps": len(result.steps),
        "all_seconds": total_seconds(result.steps),
        "last_held_out_loss": result.evaluations[-1].loss,
        "replicas_identical": result.replicas_identical,
        "parameters": result.parameters,
        "time_scale": result.time_scale,
    }


def remove_partial(out: Path) -> None:
    """Remove incomplete results, which a process left if it was killed while writing them."""
    for path in (out / RESULTS).glob(f"*{PARTIAL}"):
        path.unlink()
