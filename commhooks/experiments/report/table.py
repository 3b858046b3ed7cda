"""The report in the terminal: one table a setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commhooks.experiments.report.findings import advice_on, facts_of, finding, names_of
from commhooks.experiments.report.lines import Line, lines_of
from commhooks.experiments.report.words import NEVER, folded, signed
from commhooks.experiments.results.outcomes import Setting, settings_of
from commhooks.experiments.results.summary import curve_of, total_seconds
from commhooks.experiments.results.verdicts import USUAL, Margins, Range, Verdict
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.units import counted

_MOST = 13  # lines of a table; a page has all
_SPARKS = "▁▂▃▄▅▆▇█"
_BAR, _SPARK = 8, 12  # the widths of a bar and of a curve, in characters
_COLOURS = {Verdict.PAYS: "green", Verdict.COSTS: "red", Verdict.OPEN: "yellow", Verdict.DIVERGED: "red"}
_NUMBERS = ("loss at\nequal steps", "loss after\nequal time", "bytes\na step", "times\nfewer")
_COLUMNS = ("hook", "loss\nover time", "step\nspeed-up", *_NUMBERS, "verdict")
# Columns that are left out, and the width of names, from one attempt to the next until a table fits the terminal.
_FITS: tuple[tuple[tuple[str, ...], int], ...] = (
    ((), 60),
    ((), 20),
    (_NUMBERS[3:], 20),
    ((_COLUMNS[1], _NUMBERS[3]), 20),
    ((_COLUMNS[1], *_NUMBERS[2:]), 20),  # what verdicts rest on stays as long as it can
    ((_COLUMNS[1], *_NUMBERS[1::2]), 20),
)


def print_tables(
    results: Sequence[RunResult],
    console: Console,
    *,
    baseline: str | None = None,
    target_loss: float | None = None,
    margins: Margins = USUAL,
    failures: Sequence[RunSettings] = (),
) -> None:
    """Print each setting in at most 25 lines: a line a hook, what follows, and what to type.

    Args:
        results: Finished runs, of any number of settings, hooks and seeds.
        console: Where to.
        baseline: The hook that the others are compared with; None: all-reduce if it is there, otherwise the first.
        target_loss: The training loss to reach; None: by `results.summary.TARGET_RULE`, for each setting.
        margins: What matters in a verdict.
        failures: Runs that have no result.

    Raises:
        ValueError: No run used the baseline.

    """
    settings = settings_of(results, baseline=baseline, target=target_loss, failures=failures, margins=margins)
    for name, setting in zip(names_of(settings), settings, strict=True):
        lines = lines_of(setting)
        console.print(f"\n[bold]{escape(name)}[/bold]: [dim]{escape(facts_of(setting))}[/dim]", highlight=False)
        console.print(_fitting(console, setting, lines))
        if len(lines) > _MOST:
            console.print(f"and {counted(len(lines) - _MOST, 'hook')} more, on the page", style="dim", highlight=False)
        advice = advice_on(setting)
        console.print(finding(setting), highlight=False, markup=False)
        if lacks := [f"{line.hook}: {line.lacks}" for line in lines if line.lacks]:
            console.print(f"Not settled: {'; '.join(lacks)}.", style="yellow", highlight=False, markup=False)
        for line in lines:
            if line.hook in (advice.hook, advice.faster):
                console.print(f"    {line.code}", style="bold", highlight=False, markup=False, soft_wrap=True)


def plain_table(title: str, headings: tuple[str, ...], first: str = "hook") -> Table:
    """Return an empty table: names, which the caller escapes, in its first column, numbers in the others."""
    style = {"title_justify": "left", "title_style": "bold", "caption_justify": "left"}
    table = Table(title=escape(title), box=SIMPLE_HEAD, **style)  # type: ignore[arg-type]  # the values are of the right kinds
    table.add_column(escape(first), overflow="fold")
    for heading in headings:
        table.add_column(escape(heading), justify="right", no_wrap=True)
    return table


def _fitting(console: Console, setting: Setting, lines: Sequence[Line]) -> Table:
    """Return the table with as many columns as fit the console, if need be with folded names."""
    curves = _sparks(setting)
    for without, name_width in _FITS:
        table = _table(lines[:_MOST], curves, without, name_width)
        if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
            break
    return table


def _table(lines: Sequence[Line], curves: Mapping[str, str], without: Sequence[str], name_width: int) -> Table:
    top = max([1.0, *(line.judged.speed_up.mean for line in lines if line.judged is not None)])
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in _COLUMNS:
        if name not in without:
            table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for line in lines:
        cells = [
            escape(folded(line.hook, name_width)),
            curves[line.hook],
            "",
            "",
            "",
            *line.bytes,
            "[dim]baseline[/dim]",
        ]
        if line.judged is not None:
            cells[2] = f"{_bar(line.judged.speed_up.mean / top)} {' '.join(line.speed_up).replace(' to ', '–')}".strip()
            cells[3:5] = map(_give_or_take, (line.judged.equal_steps, line.judged.equal_time))
            cells[-1] = f"[{_COLOURS[line.judged.verdict]}]{line.verdict}[/]"
        if line.warning:
            cells[0] += f"\n[red]{escape(line.warning)}[/red]"
        table.add_row(*(text for name, text in zip(_COLUMNS, cells, strict=True) if name not in without))
    return table


def _bar(share: float) -> str:
    return ("█" * round(share * _BAR)).ljust(_BAR, "░") if math.isfinite(share) else ""


def _give_or_take(found: Range) -> str:
    half = (found.high - found.low) / 2
    return f"{signed(found.mean)} ±{half:.3f}" if math.isfinite(half) else NEVER


def _sparks(setting: Setting) -> dict[str, str]:
    """Return the logarithm of each hook's loss over the same time, mean over seeds, as a row of blocks."""
    runs = {one.hook: list(one.results.values()) for one in setting.outcomes}
    end = max(total_seconds(run.steps) for own in runs.values() for run in own)
    places = (np.arange(_SPARK) + 0.5) / _SPARK * end
    curves = {}
    for hook, own in runs.items():
        clocks = [np.cumsum([step.seconds for step in run.steps]) for run in own]
        losses = [np.log(np.maximum(curve_of([step.loss for step in run.steps]), 1e-9)) for run in own]
        each = [np.interp(places, x, y, right=math.nan) for x, y in zip(clocks, losses, strict=True)]
        curves[hook] = np.mean(each, axis=0)
    known = np.concatenate(list(curves.values()))
    known = known[np.isfinite(known)]
    low, high = (float(known.min()), float(np.percentile(known, 95))) if known.size else (0.0, 1.0)
    width = max(high - low, 1e-12)
    return {hook: "".join(_block((value - low) / width) for value in own) for hook, own in curves.items()}


def _block(share: float) -> str:
    """Return a block of this height, from 0 to 1; a space where there is no loss."""
    return _SPARKS[min(max(int(share * len(_SPARKS)), 0), len(_SPARKS) - 1)] if math.isfinite(share) else " "
