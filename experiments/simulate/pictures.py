"""Pictures of utilisation over ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import matplotlib
from matplotlib.ticker import NullFormatter, PercentFormatter

from ..links.link import format_rate
from ..report.plots import Theme, canvases, looks, png, style
from .point import Point


def utilisation_picture(points: Sequence[Point], caption: str, theme: Theme) -> bytes:
    """Return a PNG: utilisation over ranks, with a pair of axes for each rate (row) and kind of host (column)."""
    rates = list(dict.fromkeys(point.link.rate for point in points))
    insides = list(dict.fromkeys((point.link.ranks_per_host, point.link.inner_rate) for point in points))
    hooks = list(dict.fromkeys(point.hook for point in points))
    ranks = sorted({point.ranks for point in points})
    drawn = looks(hooks, "all-reduce" if "all-reduce" in hooks else None)
    with matplotlib.rc_context(style(theme)):
        width = 4.0 if len(insides) == 1 else 6.6
        height, columns = 1.5 * len(rates) + 1.2, len(insides)
        figure, every = canvases("", "", width, height, rows=len(rates), columns=columns, sharey=True)
        grid = [every[first : first + columns] for first in range(0, len(every), columns)]
        for axes_of_rate, rate in zip(grid, rates, strict=True):
            for axes, inside in zip(axes_of_rate, insides, strict=True):
                for hook in hooks:
                    own = [
                        (point.ranks, point.time.utilisation)
                        for point in points
                        if point.hook == hook
                        and point.link.rate == rate
                        and (point.link.ranks_per_host, point.link.inner_rate) == inside
                    ]
                    look = drawn[hook]
                    axes.plot(
                        [x for x, _ in own], [y for _, y in own], color=look.colour, linestyle=look.dashes,
                        linewidth=1.5, marker="o", markersize=2.5, label=look.label,
                    )  # fmt: skip
                axes.set_ylim(-0.03, 1.03)
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
                axes.set_xscale("log", base=2)
                axes.set_xticks(ranks[::2] if len(ranks) > 6 else ranks)
                axes.xaxis.set_major_formatter("{x:,.0f}")
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes_of_rate[0].set_ylabel(format_rate(rate))
        for axes, inside in zip(grid[0], insides, strict=True):
            axes.set_title(_inside_in_words(*inside), fontsize=9.5, loc="left")
        for axes in grid[-1]:
            axes.set_xlabel("ranks (logarithmic)")
        figure.suptitle("Utilisation: compute ÷ step time", x=0.02, ha="left", fontsize=11.5, fontweight="bold")
        figure.legend(
            *grid[0][0].get_legend_handles_labels(), loc="outside lower left", ncols=3 if width > 5 else 2,
            title="\n".join(textwrap.wrap(caption, round(13 * width))), title_fontsize=8.5, alignment="left",
        )  # fmt: skip
        return png(figure)


def _inside_in_words(ranks_per_host: int, inner_rate: float | None) -> str:
    if ranks_per_host == 1:
        return "one rank per host"
    if inner_rate is None:
        return f"hosts of {ranks_per_host}, no fast link inside"
    return f"hosts of {ranks_per_host}, {format_rate(inner_rate)} inside"
