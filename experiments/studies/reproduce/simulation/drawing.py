"""The pictures of the simulation's pages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from commhooks.experiments.report.plots import Theme, canvas, legend, looks


def measured_and_simulated(cases: Sequence[Any], theme: Theme) -> Figure:
    """Draw a dot for each case, with a colour for each hook and a shape for each number of hosts."""
    hooks = list(dict.fromkeys(case["hook"] for case in cases))
    hosts = list(dict.fromkeys(case["hosts"] for case in cases))
    drawn = looks(hooks, "all-reduce" if "all-reduce" in hooks else None)
    figure, axes = canvas("Simulated over measured steps", "measured step, ms (logarithmic)", 6.4, 4.8)
    for marker, number in zip("os^Dv", hosts, strict=False):
        for case in (case for case in cases if case["hosts"] == number):
            x, y = 1e3 * statistics.median(case["steps"]), 1e3 * case["simulated"]["seconds"]
            axes.scatter(x, y, s=30, marker=marker, color=drawn[case["hook"]].colour, zorder=3)
    values = [1e3 * case["simulated"]["seconds"] for case in cases]
    values += [1e3 * statistics.median(case["steps"]) for case in cases]
    low, high = min(values) / 1.3, max(values) * 1.3
    axes.plot([low, high], [low, high], color=theme.ink, linewidth=1.0, label="equal")
    axes.fill_between(
        [low, high], [0.75 * low, 0.75 * high], [1.25 * low, 1.25 * high], color=theme.faint, alpha=0.5,
        linewidth=0, label="within 25 %",
    )  # fmt: skip
    for hook in hooks:  # only for the legend: the colour is the hook's, the shape that of the number of hosts
        axes.scatter([], [], s=30, color=drawn[hook].colour, label=drawn[hook].label)
    for marker, number in zip("os^Dv", hosts, strict=False):
        axes.scatter([], [], s=30, marker=marker, color=theme.ink, label=f"{number} hosts")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_ylabel("simulated step, ms (logarithmic)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_formatter(NullFormatter())
    legend(figure, axes)
    return figure
