"""The summary in the terminal."""

from __future__ import annotations

from rich.table import Table

from experiments.report.words import (
    bytes_in_words,
    loss_change,
    milliseconds,
    percent,
    seconds_in_words,
    times,
    whole,
)
from experiments.summary import Summary


def summary_table(summaries: list[Summary], title: str) -> Table:
    """Return one task's runs as a table; the first is what the others are measured against."""
    first = summaries[0]
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left", header_style="bold")
    table.add_column("hook", no_wrap=True)
    headings = ("held-out loss", "accuracy", "moved\nper rank", "ratio", "step,\nmedian")
    split = "compute / compression /\nwaiting, ms"
    for heading in (*headings, split, "steps to\ntarget", "time to\ntarget", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(*_cells(summary, first))
    table.caption = (
        f"target: training loss {first.target_loss:.3f} · ratio and speed-up: the whole run, warm-up included · "
        "a rank's bytes as a ring moves them"
    )
    return table


def _cells(summary: Summary, first: Summary) -> list[str]:
    change = f" ({loss_change(summary, first)})" if summary is not first else ""
    parts = (summary.compute, summary.compression, summary.waiting)
    return [
        summary.hook if summary.replicas_identical else f"{summary.hook} [red](replicas differ)[/red]",
        f"{summary.held_out_loss:.3f}{change}",
        percent(summary.accuracy),
        bytes_in_words(summary.moved_bytes),
        times(summary.ratio),
        seconds_in_words(summary.step.median),
        " / ".join(milliseconds(part.median) for part in parts),
        whole(summary.steps_to_target),
        seconds_in_words(summary.seconds_to_target),
        times(summary.speed_up),
    ]
