"""The output of the leaderboard: CSV files, pictures, and a page of tables for the documentation."""

from __future__ import annotations

import csv
import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as TerminalTable

from commhooks.experiments.machine import machine, versions
from commhooks.experiments.report.plots import THEMES
from commhooks.experiments.report.table import plain_table
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from experiments.studies.blocks import Block, Table, markdown
from experiments.studies.leaderboard.board_plots import score_against_bytes, score_against_compute
from experiments.studies.leaderboard.contenders import Contender, LeftOut
from experiments.studies.leaderboard.grace import Comparison
from experiments.studies.leaderboard.standing_rows import (
    GRACE_HEADINGS,
    front_in_words,
    grace_row,
    headings,
    standing_row,
)
from experiments.studies.leaderboard.standings import Run, Standing, recommended
from experiments.studies.lockstep import SCORES, Trained

RUNS, STANDINGS, GRACE, TABLES = "runs.csv", "standings.csv", "grace.csv", "tables.md"
SORTED, END = '<div class="sorted" markdown>', "</div>"
"""The HTML around a table of the documentation that readers can sort."""
_SHOWN, _FOLDED = (0, 1, 2, 6, 4, 8), (0, 3, 5, 7)  # columns of a task's table, and of the one below it that is folded
_PICTURES = {"bytes": score_against_bytes, "compute": score_against_compute}
_ADVICE = (
    "On every task even the worse end of their interval is no worse than the plain all-reduce with another seed, and "
    "no other such compressor sends fewer bytes for as little compute. Below they have a tick (✓); bold names are on "
    "the Pareto front. Click a heading to sort by it."
)
_RUN_FIELDS = ["task", "compressor", "error_feedback", "seed", *(field.name for field in dataclasses.fields(Trained))]
_GRACE_FIELDS = ["method", "ours", "without", "with", "difference", "low", "high", "verdict"]
_STANDING_FIELDS = [
    *("task", "compressor", "error_feedback", "score_name", "score", "lowest", "highest"),
    *("difference", "difference_low", "difference_high", "payload_bytes", "vnmse", "moved_bytes", "ratio"),
    *("residual", "diverged", "compute", "compute_low", "compute_high", "on_front"),
]


@dataclass(frozen=True, kw_only=True)
class Results:
    """A leaderboard's results, and the settings of their measurement."""

    standings: list[Standing]
    grace: list[Comparison]
    left_out: list[LeftOut]
    seeds: int
    workers: int
    size: str
    steps: Mapping[str, int]  # the steps of a run, by task
    timed: tuple[str, str]  # task and size
    rounds: int
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
    """Write tables and pictures into `out`, and the documentation's into `docs`."""
    _write_csv(out / STANDINGS, _STANDING_FIELDS, map(_standing_values, results.standings))
    _write_csv(out / GRACE, _GRACE_FIELDS, map(_grace_values, results.grace))
    for pictures in [out / "plots"] if docs is None else [out / "plots", docs]:
        pictures.mkdir(parents=True, exist_ok=True)
        for task in results.steps:
            for picture, draw in _PICTURES.items():
                (pictures / f"{task}.{picture}.png").write_bytes(draw(results.of(task), THEMES[0]))
    (out / TABLES).write_text(_markdown(results, "plots"), encoding="utf-8")
    if docs is not None:
        (docs / TABLES).write_text(_markdown(results, docs.name), encoding="utf-8")


def print_board(results: Results, out: Path, console: Console) -> None:
    """Print the standings, the contenders that were left out, and the place of the results."""
    for task in results.steps:
        rows = results.of(task)
        console.print()
        title = f"{task}, {results.steps[task]} steps, {results.seeds} seeds"
        console.print(_terminal_table(f"{title}: what came out", rows, slice(1, 4)))
        console.print(_terminal_table(f"{title}: what it cost", rows, slice(4, None)))
        console.print(f"Pareto front, from few bytes to many: {front_in_words(rows)}", highlight=False)
    for one in results.left_out:
        console.print(f"left out: {one.label}: {one.reason}", highlight=False, markup=False)
    console.print(f"\ntables  {out / TABLES}", highlight=False, soft_wrap=True)


def _terminal_table(title: str, rows: Sequence[Standing], columns: slice) -> TerminalTable:
    table = plain_table(title, headings(rows[0].task)[columns], first="compressor")
    table.caption = "bold: on the Pareto front"
    for row in rows:
        cells = standing_row(row)
        table.add_row(cells[0], *cells[columns], style="bold" if row.on_front else "")
    return table


def _description(task: str, size: str) -> str:
    return load_task(Spec(task, (("size", size),))).description


def _facts() -> dict[str, str]:
    here = machine()
    return {
        "processor": f"{here['processor']}, {here['cores']} cores, one thread a process",
        "load": f"{here['load']} processes wanted to run, in the minute before the end",
        "system": str(here["system"]),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }


def _markdown(results: Results, folder: str) -> str:
    """Return the tables and pictures of the documentation's page, which contain all its measurements."""
    facts = "; ".join(f"{name}: {fact}" for name, fact in _facts().items())
    page: list[Block] = [f"`{results.command}`: {results.workers} workers, {results.seeds} seeds. {facts}."]
    advised = recommended(results.standings)
    page += ["### Try these first", _ADVICE, _advice(results, advised)]
    for task, steps in results.steps.items():
        rows, description = results.of(task), _description(task, results.size)
        cells = [standing_row(row) for row in rows]
        labels = [f"**`{row.contender.label}`**" if row.on_front else f"`{row.contender.label}`" for row in rows]
        ticks = [" ✓" if row.contender in advised else "" for row in rows]
        names = [label + tick for label, tick in zip(labels, ticks, strict=True)]
        titles = headings(task)
        page += [
            f"### {task}",
            f"{description}; {steps} steps.",
            "\n".join(f"![{task}: {picture}]({folder}/{task}.{picture}.png)" for picture in _PICTURES),
            f"Pareto front, from few bytes to many: {front_in_words(rows, code=True)}.",
            SORTED,
            Table("", [titles[n] for n in _SHOWN], _columns(names, cells, _SHOWN)),
            END,
            f'??? note "{task}: residual, vNMSE and bytes moved"',
            textwrap.indent(
                markdown([Table("", [titles[n] for n in _FOLDED], _columns(names, cells, _FOLDED))]), "    "
            ),
        ]
    if results.grace:
        page += ["### Error feedback, beside GRACE", Table("", GRACE_HEADINGS, list(map(grace_row, results.grace)))]
    if results.left_out:
        page += ["### Left out", "\n".join(f"- `{one.label}`: {one.reason}" for one in results.left_out)]
    return markdown(page)


def _columns(names: Sequence[str], cells: Sequence[Sequence[str]], shown: Sequence[int]) -> list[list[str]]:
    return [[name, *(row[n] for n in shown[1:])] for name, row in zip(names, cells, strict=True)]


def _advice(results: Results, advised: Sequence[Contender]) -> Table:
    """Return the table of what to try first: how much smaller on each task, the differences from dense, and compute."""
    columns = ["compressor"]
    for task in results.steps:
        columns += [f"{task}: smaller than dense", f"{task}: against dense, {SCORES[task].unit}"]
    rows = []
    for contender in advised:
        found = [standing_row(row) for row in results.standings if row.contender == contender]
        rows.append([f"`{contender.label}`", *(cell for row in found for cell in (row[6], row[2])), found[0][8]])
    return Table("", [*columns, "compute, copies"], rows)


def _write_csv(path: Path, fields: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(fields)
        writer.writerows(rows)


def _standing_values(row: Standing) -> list[object]:
    difference, compute = row.difference, row.compute
    return [
        *(row.task, row.contender.spec.label, row.contender.feedback, SCORES[row.task].name),
        *(row.score, row.lowest, row.highest),
        *((difference.mean, difference.low, difference.high) if difference else ("", "", "")),
        *(row.payload_bytes, row.vnmse, row.moved_bytes, row.ratio, row.residual, row.diverged),
        *((compute.median, compute.low, compute.high) if compute else ("", "", "")),
        row.on_front,
    ]


def _grace_values(one: Comparison) -> list[object]:
    ours, published = one.ours, one.published
    mine = (ours.mean, ours.low, ours.high) if ours else ("", "", "")
    return [published.method, published.ours, published.without, published.with_feedback, *mine, one.verdict]
