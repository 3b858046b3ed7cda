"""The three pictures of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

from ..runs import RunResult
from ..summary import Summary
from .words import seconds_in_words, times

_REACH = 4  # a curve's point is a mean over this many steps on either side


@dataclass(frozen=True)
class Theme:
    """The colours of a picture on a light or on a dark page."""

    name: str
    paper: str
    ink: str
    faint: str  # grid and axes
    first: str  # the first hook, the baseline for the others
    hooks: tuple[str, ...]
    compute: str
    compression: str
    waiting: str


LIGHT = Theme(
    name="light",
    paper="#ffffff",
    ink="#24292f",
    faint="#d8dee4",
    first="#57606a",
    hooks=("#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#b58900", "#c2255c", "#0c8599", "#5f3dc4"),
    compute="#2a7f9e",
    compression="#e8973a",
    waiting="#cfd6de",
)
DARK = Theme(
    name="dark",
    paper="#161b22",
    ink="#e6edf3",
    faint="#30363d",
    first="#9aa4af",
    hooks=("#6ea8fe", "#ff8f5c", "#63d07f", "#d38bf0", "#e3c04f", "#f783ac", "#4dd0e1", "#a992f5"),
    compute="#4ba3c3",
    compression="#f0ad5b",
    waiting="#4a535e",
)
THEMES = (LIGHT, DARK)


def loss_against_bytes(results: Sequence[RunResult], summaries: Sequence[Summary], theme: Theme) -> bytes:
    """Return a PNG: training loss over the bytes moved by a rank, on a logarithmic axis."""
    x = [[float(total) for total in accumulate(step.moved_bytes for step in result.steps)] for result in results]
    with matplotlib.rc_context(style(theme)):
        figure, axes = canvas("Loss against bytes", "bytes moved by a rank so far (logarithmic)", 6.4, 4.4)
        _curves(axes, x, results, summaries, theme)
        if all(values[0] > 0 for values in x):
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        return png(figure)


def loss_against_time(results: Sequence[RunResult], summaries: Sequence[Summary], theme: Theme) -> bytes:
    """Return a PNG: training loss over training time."""
    x = [list(accumulate(step.seconds for step in result.steps)) for result in results]
    with matplotlib.rc_context(style(theme)):
        figure, axes = canvas("Loss against time", "training time in seconds", 6.4, 4.4)
        _curves(axes, x, results, summaries, theme)
        axes.set_xlim(left=0)
        return png(figure)


def step_time(summaries: Sequence[Summary], theme: Theme) -> bytes:
    """Return a PNG: the typical step of every hook, divided into its parts."""
    with matplotlib.rc_context(style(theme)):
        title = "Where a step's time goes"
        figure, axes = canvas(
            title, "milliseconds a step (mean of the middle half of the steps)", 9.6, 1.5 + 0.46 * len(summaries)
        )
        rows = list(range(len(summaries)))
        left = [0.0] * len(summaries)
        for part in ("compute", "compression", "waiting"):
            widths = [1e3 * getattr(summary.typical, part) for summary in summaries]
            axes.barh(rows, widths, left=left, height=0.62, color=getattr(theme, part), label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        _step_labels(axes, summaries, left, theme)
        axes.set_yticks(rows, [summary.hook for summary in summaries])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.22 * max(left))
        axes.legend(loc="lower right", ncols=1)
        return png(figure)


def _step_labels(axes: Axes, summaries: Sequence[Summary], ends: Sequence[float], theme: Theme) -> None:
    """Write beside each bar its length, and how many times as fast as the first hook's step it is."""
    for row, (summary, end) in enumerate(zip(summaries, ends, strict=True)):
        faster = f"   {times(summaries[0].typical.seconds / summary.typical.seconds)} as fast" if row else ""
        text = f"  {seconds_in_words(summary.typical.seconds)}{faster}"
        axes.annotate(text, (end, row), va="center", fontsize=9, color=theme.ink)


def _curves(
    axes: Axes,
    x: Sequence[Sequence[float]],
    results: Sequence[RunResult],
    summaries: Sequence[Summary],
    theme: Theme,
) -> None:
    """Draw every run's smoothed training loss, its held-out loss as dots, and the target."""
    smoothed = [_smooth([step.loss for step in result.steps]) for result in results]
    for number, (xs, result, losses) in enumerate(zip(x, results, smoothed, strict=True)):
        colour = theme.first if number == 0 else theme.hooks[(number - 1) % len(theme.hooks)]
        style = ("-", (0, (4, 2)))[number % 2 == 0 and number > 0]  # two hooks may have identical curves
        axes.plot(xs, losses, linestyle=style, color=colour, linewidth=1.8, label=result.settings.hook.label)
        held_out_x, held_out = [xs[e.step - 1] for e in result.evaluations], [e.loss for e in result.evaluations]
        axes.scatter(held_out_x, held_out, s=18, color=colour, edgecolor=theme.paper, linewidth=0.6, zorder=3)
    target = summaries[0].target_loss
    axes.axhline(target, color=theme.ink, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.7)
    axes.annotate(
        f"target {target:.3g}",
        (0.995, target),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=theme.ink,
    )
    if max(map(max, smoothed)) > 20 * min(map(min, smoothed)) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("loss (line: training, dots: held out)")
    axes.figure.legend(loc="outside lower left", ncols=3)


def _smooth(losses: Sequence[float]) -> list[float]:
    """Return at every step the mean of the surrounding losses: a curve that does not lag behind its points."""
    reach = [min(_REACH, n, len(losses) - 1 - n) for n in range(len(losses))]
    return [fmean(losses[n - r : n + r + 1]) for n, r in enumerate(reach)]


def canvas(title: str, x_label: str, width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, titled at the left."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold", pad=10)
    axes.set_xlabel(x_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def style(theme: Theme) -> dict[Any, Any]:
    """Return the style of a picture, for `matplotlib.rc_context`."""
    return {
        "figure.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.faint,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "axes.grid": True,
        "grid.color": theme.faint,
        "grid.linewidth": 0.6,
        "font.size": 9.5,
        "axes.titlesize": 11.5,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
    }


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG that does not depend on the clock."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()
