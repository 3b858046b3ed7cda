"""The leaderboard's pictures: the score against bytes, and against compute."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation, Text
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from matplotlib.transforms import Bbox

from commhooks.experiments.report.plots import Theme, canvas, png, style
from commhooks.experiments.report.words import percent
from experiments.studies.leaderboard.standings import Standing
from experiments.studies.lockstep import SCORES

_ROOM = 0.004  # added to the error before taking its logarithm, so that an accuracy of 1 can be shown
_ACCURACIES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)
_OFFSETS = [(x * distance, y * distance) for distance in (9, 16, 26, 38) for x, y in
            ((0.7, -1), (0.7, 0.7), (-0.7, 0.7), (-0.7, -1), (0, 1), (0, -1.4))]  # fmt: skip

Measure = Callable[[Standing], float]


def score_against_bytes(rows: Sequence[Standing], theme: Theme) -> bytes:
    """Return a PNG: score over payload bytes per step, on a logarithmic axis, with the Pareto front."""
    label = "payload bytes of a worker and step (logarithmic)"
    return _picture(rows, theme, "bytes", label, lambda row: row.payload_bytes)


def score_against_compute(rows: Sequence[Standing], theme: Theme) -> bytes:
    """Return a PNG: score over compute; the labelled points are those on the Pareto front in bytes."""
    label = "compress and decompress, in copies of the gradient (logarithmic; bar: quartiles)"
    return _picture(rows, theme, "compute", label, lambda row: row.compute.median if row.compute else math.nan)


def _picture(rows: Sequence[Standing], theme: Theme, against: str, label: str, measure: Measure) -> bytes:
    score = SCORES[rows[0].task]
    seen = [row for row in rows if math.isfinite(row.score) and measure(row) > 0]
    with matplotlib.rc_context(style(theme)):
        figure, axes = canvas(f"{rows[0].task}: {score.name} against {against}", label, 9.6, 5.4)
        if seen:
            axes.set_xscale("log")
            axes.margins(x=0.08)
            _score_axis(axes, seen)
            _points(axes, seen, theme, measure)
            if against == "bytes":
                _front_line(axes, seen, theme)
                axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
            else:
                _quartiles(axes, seen, theme)
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_minor_formatter(NullFormatter())
            if lost := [row.contender.label for row in rows if not math.isfinite(row.score)]:
                axes.plot([], [], " ", label=f"diverged, not drawn: {', '.join(lost)}")
            figure.legend(loc="outside lower left", ncols=4)
            figure.draw_without_rendering()
            _name_front(axes, seen, theme, measure)
        return png(figure)


def _score_axis(axes: Axes, rows: Sequence[Standing]) -> None:
    """Put better scores higher; stretch accuracies near 1, where most of them are."""
    score = SCORES[rows[0].task]
    if score.scale != 100:
        axes.invert_yaxis()
        axes.set_ylabel(f"{score.name}, {score.unit} (better: up)")
        return

    def spread(accuracy: Any) -> Any:
        return -np.log(np.maximum(1 - accuracy, 0) + _ROOM)

    def back(value: Any) -> Any:
        return 1 + _ROOM - np.exp(-value)

    axes.set_yscale("function", functions=(spread, back))
    low, high = (limit(row.score for row in rows) for limit in (min, max))
    reach = 0.06 * (spread(high) - spread(low)) + 0.05
    axes.set_ylim(back(spread(low) - reach), back(spread(high) + reach))
    axes.yaxis.set_major_locator(FixedLocator(_ACCURACIES))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    axes.set_ylabel(f"{score.name} (mean over seeds)")


def _points(axes: Axes, rows: Sequence[Standing], theme: Theme, measure: Measure) -> None:
    kinds = {
        "dense": ("D", theme.first, theme.first),
        "without error feedback": ("o", theme.paper, theme.hooks[0]),
        "with error feedback (+ EF)": ("o", theme.hooks[0], theme.hooks[0]),
    }
    for name, (marker, face, edge) in kinds.items():
        own = [row for row in rows if _kind(row) == name]
        x, y = [measure(row) for row in own], [row.score for row in own]
        axes.scatter(x, y, s=34, marker=marker, facecolor=face, edgecolor=edge, linewidth=1.3, label=name, zorder=3)


def _kind(row: Standing) -> str:
    if row.difference is None:
        return "dense"
    return "with error feedback (+ EF)" if row.contender.feedback else "without error feedback"


def _front_line(axes: Axes, rows: Sequence[Standing], theme: Theme) -> None:
    """Draw the front: the score that is attainable from each number of bytes on."""
    front = sorted((row for row in rows if row.on_front), key=lambda row: row.payload_bytes)
    x, y = [row.payload_bytes for row in front], [row.score for row in front]
    axes.plot(x, y, drawstyle="steps-post", color=theme.hooks[1], linewidth=1.4, label="Pareto front", zorder=2)


def _quartiles(axes: Axes, rows: Sequence[Standing], theme: Theme) -> None:
    for row in rows:
        if row.compute is not None:
            axes.plot(
                [row.compute.low, row.compute.high], [row.score] * 2, color=theme.hooks[0], linewidth=0.8, alpha=0.6
            )


def _name_front(axes: Axes, rows: Sequence[Standing], theme: Theme, measure: Measure) -> None:
    """Write the names of the front's members where they cover nothing, if such a place exists."""
    points = axes.transData.transform([(measure(row), row.score) for row in rows])
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in points]
    for row in sorted((row for row in rows if row.on_front), key=measure):
        place = (measure(row), row.score)
        tried = ((offset, _annotate(axes, row.contender.label, place, offset, theme)) for offset in _OFFSETS)
        for offset, text in tried:
            text.get_window_extent()  # finds its position; the box that it returns also holds the line to the point
            box = Text.get_window_extent(text)
            if _is_free(box, axes, taken) or offset is _OFFSETS[-1]:
                taken.append(box)
                break
            text.remove()


def _annotate(
    axes: Axes, label: str, place: tuple[float, float], offset: tuple[float, float], theme: Theme
) -> Annotation:
    sides = {-1: "right", 0: "center", 1: "left"}
    text = axes.annotate(
        label,
        place,
        xytext=offset,
        textcoords="offset points",
        ha=sides[int(math.copysign(1, offset[0])) if offset[0] else 0],
        va="center",
        fontsize=8,
        color=theme.hooks[1],
        arrowprops={"arrowstyle": "-", "color": theme.hooks[1], "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
        zorder=4,
    )
    text.set_in_layout(False)  # the axes stay where they were when places were tried
    return text


def _is_free(box: Bbox, axes: Axes, taken: Sequence[Bbox]) -> bool:
    frame = axes.get_window_extent()
    corners = itertools.product((box.x0, box.x1), (box.y0, box.y1))
    return all(frame.contains(x, y) for x, y in corners) and not any(box.overlaps(other) for other in taken)
