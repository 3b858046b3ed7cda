"""The leaderboard's results: CSV files, tables for a terminal and a page, and the differences that `plan` shows."""

from __future__ import annotations

import csv
import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as TerminalTable

from commhooks.experiments.accuracy import Accuracy, Difference, TaskAccuracy
from commhooks.experiments.machine import machine, versions
from commhooks.experiments.report.table import plain_table
from commhooks.experiments.report.words import NEVER, percent, times
from commhooks.experiments.results.intervals import Interval
from commhooks.units import bytes_in_words
from experiments.studies.blocks import Block, Table, markdown
from experiments.studies.leaderboard.contenders import DENSE, LeftOut
from experiments.studies.leaderboard.standings import Run, Standing, recommended
from experiments.studies.lockstep import SCORES, Trained

RUNS, STANDINGS, TABLES = "runs.csv", "standings.csv", "tables.md"
SORTED, END = '<div class="sorted" markdown>', "</div>"
"""The HTML around a table of the documentation that readers can sort."""
_SHOWN, _FOLDED = (0, 1, 2, 6, 4, 8), (0, 3, 5, 7)  # columns of a task's table, and of the one below it that is folded
_ADVICE = (
    "On every task even the worse end of their interval is no worse than the plain all-reduce with another seed, and "
    "no other such compressor sends fewer bytes for as little compute. In the tables of all compressors they have a "
    "tick (✓), and names on the Pareto front are bold. Click a heading to sort by it."
)
_RUN_FIELDS = ["task", "compressor", "error_feedback", "seed", *(field.name for field in dataclasses.fields(Trained))]
_GUESSED = {"digits": 10.0, "gpt": math.log(256), "lstm": math.log(256)}  # the score of a guess, in the task's unit


@dataclass(frozen=True, kw_only=True)
class Results:
    """A leaderboard's results, and the settings of their measurement."""

    standings: list[Standing]
    left_out: list[LeftOut]
    seeds: int
    workers: int
    descriptions: Mapping[str, str]  # by task
    steps: Mapping[str, int]  # the steps of a run, by task
    command: str

    def of(self, task: str) -> list[Standing]:
        """Return the standings of a task."""
        return [row for row in self.standings if row.task == task]


def prepare_board(out: Path, *, overwrite: bool) -> None:
    """Create the folder, without an earlier leaderboard's runs.

    Raises:
        ValueError: It has such runs, and they are not to be overwritten, or it is a file.

    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder")
    if (out / RUNS).exists() and not overwrite:
        raise ValueError(f"{out} holds results already: name another folder, or give --overwrite")
    out.mkdir(parents=True, exist_ok=True)
    (out / RUNS).unlink(missing_ok=True)


class RunsFile:
    """The table of runs, which grows as they end: finished runs survive Ctrl-C."""

    def __init__(self, out: Path) -> None:
        self._path = out / RUNS
        _write_csv(self._path, _RUN_FIELDS, [])

    def append(self, run: Run) -> None:
        """Add a run."""
        row = [run.task, run.contender.spec.label, run.contender.feedback, run.seed]
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([*row, *dataclasses.astuple(run.trained)])


def write_board(results: Results, out: Path, docs: Path | None) -> None:
    """Write the tables into `out`, and the documentation's into `docs`."""
    rows = list(map(_flat, results.standings))
    fields = list(dict.fromkeys(name for row in rows for name in row))
    _write_csv(out / STANDINGS, fields, [[row.get(name, "") for name in fields] for row in rows])
    text = _markdown(results)
    for folder in [out] if docs is None else [out, docs]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TABLES).write_text(text, encoding="utf-8")


def print_board(results: Results, out: Path, console: Console) -> None:
    """Print the standings, the contenders that were left out, and the place of the results."""
    for task in results.steps:
        rows = results.of(task)
        console.print()
        title = f"{task}, {results.steps[task]} steps, {results.seeds} seeds"
        console.print(_terminal_table(f"{title}: what came out", rows, slice(1, 4)))
        console.print(_terminal_table(f"{title}: what it cost", rows, slice(4, None)))
        console.print(f"Pareto front, from few bytes to many: {', '.join(_front(rows))}", highlight=False)
    for one in results.left_out:
        console.print(f"left out: {one.label}: {one.reason}", highlight=False, markup=False)
    console.print(f"\ntables  {out / TABLES}", highlight=False, soft_wrap=True)


def accuracy_of(results: Results) -> Accuracy:
    """Return the differences of all contenders of every task, in the task's unit."""
    here = machine()
    return Accuracy(
        tasks=tuple(_task_accuracy(results, task) for task in results.steps),
        workers=results.workers,
        command=results.command,
        machine=f"{here['processor']}, {here['cores']} cores",
        versions=versions(),
    )


def _task_accuracy(results: Results, task: str) -> TaskAccuracy:
    score, rows = SCORES[task], results.of(task)
    dense = next(row for row in rows if row.contender.spec.name == DENSE)
    return TaskAccuracy(
        task=task,
        description=results.descriptions[task],
        score=score.name,
        unit=score.unit,
        higher_is_better=score.higher_is_better,
        steps=results.steps[task],
        seeds=results.seeds,
        seed_range=score.scale * (dense.highest - dense.lowest),
        fall=abs(score.scale * dense.score - _GUESSED[task]),
        differences=tuple(map(_difference, rows)),
    )


def _difference(row: Standing) -> Difference:
    """Return a contender's difference; dense's own is zero."""
    compressor = str(row.contender.make())
    if row.difference is None:
        return Difference(compressor, 0.0, 0.0, 0.0)
    own = row.difference.scaled(SCORES[row.task].scale)
    if row.diverged or not all(map(math.isfinite, (own.mean, own.low, own.high))):
        return Difference(compressor, None, None, None)
    return Difference(compressor, own.mean, own.low, own.high)


def headings(task: str) -> tuple[str, ...]:
    """Return the column headings of a task's table."""
    score = SCORES[task]
    return (
        "compressor",
        f"{score.name} (range)",
        f"against dense, {score.unit}",
        "residual / gradient",
        "payload a step",
        "vNMSE",
        "smaller than dense",
        "moved a step",
        "compute, copies",
    )


def standing_row(row: Standing) -> list[str]:
    """Return a contender's cells."""
    score, compute = SCORES[row.task], row.compute
    form: Callable[[float], str] = percent if score.scale == 100 else "{:.3f}".format
    mean, low, high = map(form, (row.score, row.lowest, row.highest))
    diverged = f", {row.diverged} diverged" if row.diverged else ""
    return [
        row.contender.label,
        f"{mean} ({low} – {high}{diverged})",
        NEVER if row.difference is None else _interval(row.difference.scaled(score.scale)),
        NEVER if row.residual is None else f"{row.residual:.3g}",
        bytes_in_words(row.payload_bytes),
        f"{row.vnmse:.2g}",
        times(row.ratio),
        bytes_in_words(row.moved_bytes),
        NEVER if compute is None else f"{compute.median:.1f} ({compute.low:.1f} – {compute.high:.1f})",
    ]


def _interval(interval: Interval) -> str:
    if not math.isfinite(interval.mean):
        return "diverged"
    mean, low, high = (round(value, 2) + 0.0 for value in (interval.mean, interval.low, interval.high))  # no -0.00
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"


def _front(rows: Sequence[Standing]) -> list[str]:
    """Return the names of the contenders on the Pareto front, from few bytes to many."""
    return [row.contender.label for row in sorted(rows, key=lambda row: row.payload_bytes) if row.on_front]


def _terminal_table(title: str, rows: Sequence[Standing], columns: slice) -> TerminalTable:
    table = plain_table(title, headings(rows[0].task)[columns], first="compressor")
    table.caption = "bold: on the Pareto front"
    for row in rows:
        cells = standing_row(row)
        table.add_row(cells[0], *cells[columns], style="bold" if row.on_front else "")
    return table


def _markdown(results: Results) -> str:
    """Return the tables of the documentation's page, which contain all its measurements."""
    here = machine()
    page: list[Block] = [
        f"`{results.command}`: {results.workers} workers, {results.seeds} seeds. "
        f"processor: {here['processor']}, {here['cores']} cores, one thread a process; "
        f"load: {here['load']} processes wanted to run, in the minute before the end; system: {here['system']}; "
        f"versions: {', '.join(f'{name} {version}' for name, version in versions().items())}.",
        *("### Try these first", _ADVICE, _advice(results)),
    ]
    advised = recommended(results.standings)
    for task, steps in results.steps.items():
        rows, titles = results.of(task), headings(task)
        cells = []
        for row in rows:
            label = f"**`{row.contender.label}`**" if row.on_front else f"`{row.contender.label}`"
            cells.append([label + " ✓" * (row.contender in advised), *standing_row(row)[1:]])
        shown, folded = (
            Table("", [titles[n] for n in columns], [[row[n] for n in columns] for row in cells])
            for columns in (_SHOWN, _FOLDED)
        )
        page += [
            f"### {task}",
            f"{results.descriptions[task]}; {steps} steps.",
            f"Pareto front, from few bytes to many: {', '.join(f'`{name}`' for name in _front(rows))}.",
            *(SORTED, shown, END),
            f'??? note "{task}: residual, vNMSE and bytes moved"',
            textwrap.indent(markdown([folded]), "    "),
        ]
    if results.left_out:
        page += ["### Left out", "\n".join(f"- `{one.label}`: {one.reason}" for one in results.left_out)]
    return markdown(page)


def _advice(results: Results) -> Table:
    """Return the table of what to try first: how much smaller on each task, the differences from dense, and compute."""
    columns = ["compressor"]
    for task in results.steps:
        columns += [f"{task}: smaller than dense", f"{task}: against dense, {SCORES[task].unit}"]
    rows = []
    for contender in recommended(results.standings):
        found = [standing_row(row) for row in results.standings if row.contender == contender]
        rows.append([f"`{contender.label}`", *(cell for row in found for cell in (row[6], row[2])), found[0][8]])
    return Table("", [*columns, "compute, copies"], rows)


def _write_csv(path: Path, fields: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(fields)
        writer.writerows(rows)


def _flat(row: Standing) -> dict[str, object]:
    """Return a standing's values by column of the CSV file: of a difference its mean, low and high."""
    values = {"task": row.task, "compressor": row.contender.spec.label, "error_feedback": row.contender.feedback}
    for name, value in dataclasses.asdict(row).items():
        if isinstance(value, dict) and name != "contender":
            values |= {f"{name}_{part}": own for part, own in value.items()}
        elif name != "contender" and value is not None:
            values[name] = value
    return values
