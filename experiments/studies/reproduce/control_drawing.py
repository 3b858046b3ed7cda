"""The picture of `control-link`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from experiments.report.plots import Theme, canvas, legend, looks


def steps_picture(
    controlled: Mapping[str, Any], fixed: Mapping[str, Sequence[float]], rates: Sequence[str], steps: int, theme: Theme
) -> Figure:
    """Draw a dot for each step of the controller, in the colour of its compressor; a line for each fixed one.

    Args:
        controlled: The run of the controller: seconds and rung of each step.
        fixed: Each fixed compressor's mean step in each phase.
        rates: Of the phases.
        steps: Of a phase.
        theme: The colours.

    """
    hooks = list(fixed)
    drawn = looks(hooks, "all-reduce" if "all-reduce" in hooks else None)
    figure, axes = canvas("Steps on a link that changes", "step", 7.2, 4.2)
    for hook, means in fixed.items():
        for phase, seconds in enumerate(means):
            ends = [phase * steps, (phase + 1) * steps]
            axes.plot(ends, [1e3 * seconds] * 2, color=drawn[hook].colour, linewidth=1.0, linestyle=(0, (4, 2)))
    numbered = list(enumerate(zip(controlled["seconds"], controlled["rungs"], strict=True)))
    for hook, group in groupby(numbered, key=lambda one: one[1][1]):
        own = list(group)
        axes.plot(
            [number for number, _ in own], [1e3 * seconds for _, (seconds, _) in own],
            color=drawn[hook].colour, marker="o", markersize=2.5, linewidth=0.8, zorder=3,
        )  # fmt: skip
    for hook in hooks:  # only for the legend
        axes.plot([], [], color=drawn[hook].colour, marker="o", markersize=3, label=drawn[hook].label)
    axes.plot([], [], color=theme.ink, linewidth=1.0, linestyle=(0, (4, 2)), label="fixed: mean of the phase")
    for phase, rate in enumerate(rates):
        axes.axvline(phase * steps, color=theme.ink, linewidth=0.6)
        axes.annotate(
            rate, (phase * steps, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
            textcoords="offset points", va="top", zorder=4,
            bbox={"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylabel("step, ms (logarithmic)")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0, steps * len(rates))
    legend(figure, axes)
    return figure
