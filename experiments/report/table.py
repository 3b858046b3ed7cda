"""The report's tables in the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..outcomes import settings_of
from ..runs import RunResult
from .findings import finding, names_of
from .rows import Cell, Grid, cost_grid, outcome_grid, overview_grid

_NAME_WIDTH = 12  # a longer name is folded if there is no room
_SMALL_WIDTH = 16  # of what stands below a number


def print_tables(
    results: Sequence[RunResult],
    console: Console,
    *,
    baseline: str | None = None,
    target_loss: float | None = None,
) -> None:
    """Print what came out of every setting, what it cost, and what follows.

    Args:
        results: Finished runs, of any number of settings, hooks and seeds.
        console: Where to.
        baseline: The hook that the others are compared with; None: all-reduce if it is there, otherwise the first.
        target_loss: The training loss to reach; None: by `experiments.summary.TARGET_RULE`, for each setting.

    Raises:
        ValueError: No run used the baseline.

    """
    settings = settings_of(results, baseline=baseline, target=target_loss)
    names = names_of(settings)
    for name, setting in zip(names, settings, strict=True):
        console.print()
        for grid in (outcome_grid(setting), cost_grid(setting)):
            _print(console, grid, f"{name}: {grid.title[0].lower()}{grid.title[1:]}")
        console.print(finding(setting), highlight=False, markup=False)
    if len(settings) > 1:
        console.print()
        _print(console, overview_grid(settings, names))


def plain_table(title: str, headings: tuple[str, ...], first: str = "hook") -> Table:
    """Return an empty table: names in its first column, numbers in the others."""
    style = {"title_justify": "left", "title_style": "bold", "caption_justify": "left"}
    table = Table(title=title, box=SIMPLE_HEAD, **style)  # type: ignore[arg-type]  # the values are of the right kinds
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _print(console: Console, grid: Grid, title: str = "") -> None:
    console.print(_table(grid, title))
    console.print(f"{grid.caption}\n", style="dim", highlight=False, markup=False)


def _table(grid: Grid, title: str = "") -> Table:
    """Return the grid without the columns that only a page has room for; the parts of a step share a column."""
    parts = [place for place, heading in enumerate(grid.headings) if heading.part]
    kept = [place for place, heading in enumerate(grid.headings) if not heading.wide and place not in parts[1:]]
    headings = []
    for place in kept:
        heading = grid.headings[place]
        text = " / ".join(grid.headings[part].text for part in parts) if place in parts else heading.text
        headings.append(f"{textwrap.fill(text, 12 if place not in parts else 23)}\n{heading.small}".rstrip())
    table = plain_table(escape(title or grid.title), tuple(map(escape, headings[1:])), escape(headings[0]))
    table.pad_edge, table.collapse_padding = False, True  # a row fits 100 columns
    table.columns[0].min_width = min(_NAME_WIDTH, max(len(row[0].main) for row in grid.rows))
    for row in grid.rows:
        table.add_row(
            *(" / ".join(row[part].main for part in parts) if place in parts else _text(row[place]) for place in kept)
        )
    return table


def _text(cell: Cell) -> str:
    lines = [line for text in cell.small for line in textwrap.wrap(text, _SMALL_WIDTH)]
    small = "".join(f"\n[dim]{escape(line)}[/dim]" for line in lines)
    warning = f"\n[red]{escape(cell.warning)}[/red]" if cell.warning else ""
    main = f"[bold]{escape(cell.main)}[/bold]" if cell.best else escape(cell.main)
    return f"{main}{warning}{small}"
