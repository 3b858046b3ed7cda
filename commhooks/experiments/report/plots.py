"""The style of the pictures: themes, canvases, colours of hooks, and PNG files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from commhooks.experiments.report.words import shortened

LABEL_LENGTH = 44  # of a hook in a legend
_DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))


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


@dataclass(frozen=True)
class Look:
    """The style of one hook's lines, the same in all pictures of a report."""

    colour: str
    dashes: Any  # a line style of matplotlib
    label: str


def looks(hooks: Sequence[str], baseline: str | None) -> Mapping[str, Look]:
    """Return the style of each hook; the baseline is grey."""
    found, others = {}, [hook for hook in hooks if hook != baseline]
    for number, hook in enumerate(others):
        colour, dashes = LIGHT.hooks[number % len(LIGHT.hooks)], _DASHES[number // len(LIGHT.hooks) % len(_DASHES)]
        found[hook] = Look(colour, dashes, shortened(hook, LABEL_LENGTH))
    if baseline is not None:
        found[baseline] = Look(LIGHT.first, "-", shortened(baseline, LABEL_LENGTH))
    return found


def legend(figure: Figure, axes: Axes, *, width: float = 6.4) -> None:
    """Name the curves of these axes below the picture, in as many columns as their names leave room for."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    columns = min(len(labels), max(1, int(width * 13 // (max(map(len, labels)) + 6))))
    figure.legend(handles, labels, loc="outside lower left", ncols=columns)
    figure.set_figheight(
        figure.get_figheight() + 0.18 * (math.ceil(len(labels) / columns) - 1)
    )  # the axes stay as high


def canvas(title: str, x_label: str, width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, titled at the left."""
    figure, (axes,) = canvases(title, x_label, width, height)
    return figure, axes


def canvases(
    title: str, x_label: str, width: float, height: float, *, rows: int = 1, columns: int = 1, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure with axes, row by row; the title stands over the first, `x_label` below the last."""
    figure = Figure(figsize=(width, height), layout="constrained")
    every = list(figure.subplots(rows, columns, squeeze=False, sharex=rows > 1, sharey=sharey).flat)
    every[0].set_title(title, loc="left", fontweight="bold", pad=10)
    every[-1].set_xlabel(x_label)
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    return figure, every


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
        "svg.hashsalt": "commhooks",
    }


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG that does not depend on the clock."""
    return _saved(figure, "png", {"Software": None})


def files_of(figure: Figure) -> dict[str, bytes]:
    """Return the figure as PNG, SVG and PDF, by suffix, none of which depends on the clock."""
    made = {"png": png(figure)}
    figure.set_layout_engine("none")  # once laid out, it stays as it is
    return made | {kind: _saved(figure, kind, {key: None}) for kind, key in (("svg", "Date"), ("pdf", "CreationDate"))}


def _saved(figure: Figure, kind: str, metadata: dict[str, Any]) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()
