"""The summary in the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from commhooks.units import bytes_in_words

from ..summary import Summary
from .words import (
    loss_change,
    milliseconds,
    percent,
    seconds_in_words,
    times,
    whole,
)


def summary_tables(summaries: list[Summary], title: str) -> list[Table]:
    """Return one task's runs as two tables: the outcome, and the cost."""
    first = summaries[0]
    outcome = plain_table(
        f"{title}: what came out", ("held-out loss", "accuracy", "steps to\ntarget", "time to\ntarget")
    )
    outcome.caption = f"target: training loss {first.target_loss:.3f}"
    cost = plain_table(
        f"{title}: what it cost",
        (
            "moved\nper rank",
            "ratio",
            "step,\nmedian",
            "compute / compression\n/ waiting, ms",
            "step\nspeed-up",
            "run\nspeed-up",
        ),
    )
    cost.caption = "a rank's bytes as a ring moves them; ratio and run speed-up: warm-up included"
    for summary in summaries:
        outcome.add_row(*_outcome_cells(summary, first))
        cost.add_row(*_cost_cells(summary))
    return [outcome, cost]


def plain_table(title: str, headings: tuple[str, ...], first: str = "hook") -> Table:
    """Return an empty table: names in its first column, numbers in the others."""
    style = {"title_justify": "left", "title_style": "bold", "caption_justify": "left"}
    table = Table(title=title, box=SIMPLE_HEAD, **style)  # type: ignore[arg-type]  # the values are of the right kinds
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _outcome_cells(summary: Summary, first: Summary) -> list[str]:
    change = f" ({loss_change(summary, first)})" if summary is not first else ""
    return [
        summary.hook if summary.replicas_identical else f"{summary.hook} [red](replicas differ)[/red]",
        f"{summary.held_out_loss:.3f}{change}",
        percent(summary.accuracy),
        whole(summary.steps_to_target),
        seconds_in_words(summary.seconds_to_target),
    ]


def _cost_cells(summary: Summary) -> list[str]:
    parts = (summary.compute, summary.compression, summary.waiting)
    return [
        summary.hook,
        bytes_in_words(summary.moved_bytes),
        times(summary.ratio),
        seconds_in_words(summary.step.median),
        " / ".join(milliseconds(part.median) for part in parts),
        times(summary.step_speed_up),
        times(summary.speed_up),
    ]
