"""The report's tables in the terminal."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..results.outcomes import settings_of
from ..runs import RunResult, RunSettings
from .findings import finding, names_of
from .rows import Cell, Grid, cost_grid, outcome_grid, overview_grid, time_grid
from .words import folded

_NAME_WIDTHS = (20, 13)  # longer names are folded, if there is no room
_SMALL_WIDTH = 16  # of what stands below a number


def print_tables(
    results: Sequence[RunResult],
    console: Console,
    *,
    baseline: str | None = None,
    target_loss: float | None = None,
    failures: Sequence[RunSettings] = (),
) -> None:
    """Print what came out of every setting, after the same time and at equal steps, what it cost, and what follows.

    Args:
        results: Finished runs, of any number of settings, hooks and seeds.
        console: Where to.
        baseline: The hook that the others are compared with; None: all-reduce if it is there, otherwise the first.
        target_loss: The training loss to reach; None: by `experiments.results.summary.TARGET_RULE`, for each setting.
        failures: Runs that have no result.

    Raises:
        ValueError: No run used the baseline.

    """
    settings = settings_of(results, baseline=baseline, target=target_loss, failures=failures)
    names = names_of(settings)
    for name, setting in zip(names, settings, strict=True):
        console.print()
        for grid in (time_grid(setting), outcome_grid(setting), cost_grid(setting)):
            _print(console, grid, f"{name}: {grid.title[0].lower()}{grid.title[1:]}")
        console.print(finding(setting), highlight=False, markup=False)
    if len(settings) > 1:
        console.print()
        _print(console, overview_grid(settings, names))


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown, with an empty one at the end: names first, numbers in other columns."""
    table = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return [*("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table), ""]


def plain_table(title: str, headings: tuple[str, ...], first: str = "hook") -> Table:
    """Return an empty table: names, which the caller escapes, in its first column, numbers in the others."""
    style = {"title_justify": "left", "title_style": "bold", "caption_justify": "left"}
    table = Table(title=escape(title), box=SIMPLE_HEAD, **style)  # type: ignore[arg-type]  # the values are of the right kinds
    table.add_column(escape(first), overflow="fold")
    for heading in headings:
        table.add_column(escape(heading), justify="right", no_wrap=True)
    return table


def _print(console: Console, grid: Grid, title: str = "") -> None:
    console.print(title or grid.title, style="bold", highlight=False, markup=False)
    for table in _fitting(console, grid):
        console.print(table)
    console.print(f"{grid.caption}\n" if grid.caption else "", style="dim", highlight=False, markup=False)


def _fitting(console: Console, grid: Grid) -> list[Table]:
    """Return the grid without the columns that only a page has room for, as tables that fit the console.

    There is one table if it fits, if need be with folded names. Otherwise each has the names and some of the columns.
    """
    parts = [place for place, heading in enumerate(grid.headings) if heading.part]
    columns = [place for place, heading in enumerate(grid.headings) if not heading.wide and place not in parts[1:]]
    for name_width in (console.width, *_NAME_WIDTHS):
        table = _table(console, grid, columns, name_width)
        if _width(console, table) <= console.width:
            return [table]
    shares: list[list[int]] = [[]]
    for place in columns[1:]:
        wider = _table(console, grid, [0, *shares[-1], place], _NAME_WIDTHS[0])
        if shares[-1] and _width(console, wider) > console.width:
            shares.append([])
        shares[-1].append(place)
    return [_table(console, grid, [0, *share], _NAME_WIDTHS[0]) for share in shares]


def _width(console: Console, table: Table) -> int:
    return console.measure(table, options=console.options.update(width=1000)).minimum


def _table(console: Console, grid: Grid, columns: Sequence[int], name_width: int) -> Table:
    """Return these columns of the grid; the parts of a step share a column."""
    parts = [place for place, heading in enumerate(grid.headings) if heading.part]
    headings = []
    for place in columns:
        heading = grid.headings[place]
        text = " / ".join(grid.headings[part].text for part in parts) if place in parts else heading.text
        headings.append(f"{folded(text, 12 if place not in parts else 23)}\n{heading.small}".rstrip())
    table = plain_table("", tuple(headings[1:]), headings[0])
    table.pad_edge, table.collapse_padding = False, True
    for row in grid.rows:
        first = dataclasses.replace(row[0], main=folded(row[0].main, name_width))
        cells = [" / ".join(row[n].main for n in parts) if n in parts else _text(row[n]) for n in columns[1:]]
        table.add_row(_text(first), *cells)
    for column in table.columns:  # a column that is too narrow would lose digits
        column.min_width = max(console.measure(text).maximum for text in (column.header, *column.cells))
    return table


def _text(cell: Cell) -> str:
    lines = [line for text in cell.small for line in textwrap.wrap(text, _SMALL_WIDTH)]
    small = "".join(f"\n[dim]{escape(line)}[/dim]" for line in lines)
    warning = f"\n[red]{escape(cell.warning)}[/red]" if cell.warning else ""
    main = f"[bold]{escape(cell.main)}[/bold]" if cell.best else escape(cell.main)
    return f"{main}{warning}{small}"
