"""The picture of a step's time: compute, compression and waiting."""

from __future__ import annotations

import matplotlib

from ..results.outcomes import PARTS, Setting
from .plots import LIGHT, canvas, png, style
from .words import seconds_in_words, shortened, times

# By the number of seeds.
_WHISKERS = {1: " (whisker: the quartiles of its steps)", 2: " (whisker: from one seed to the other)"}


def step_time(setting: Setting) -> bytes:
    """Return a PNG: the typical step of every hook, divided into its parts, with the spread of the whole."""
    hooks = setting.outcomes
    whole = [one.step for one in hooks]
    # The quartiles of the steps of one seed, the interval over several.
    spreads = [one.step.ends if one.step.seeds > 1 else (one.step_spread.low, one.step_spread.high) for one in hooks]
    top = max(max(one.mean, high) for one, (_, high) in zip(whole, spreads, strict=True))
    scale, unit = (1.0, "seconds") if top >= 2 else (1e3, "milliseconds")
    # One interval that is much wider than every bar must not squeeze the bars.
    limit = scale * min(top, 2 * max(one.mean for one in whole))
    with matplotlib.rc_context(style(LIGHT)):
        label = f"{unit} a step" + _WHISKERS.get(len(setting.seeds), " (whisker: 95 % interval over seeds)")
        figure, axes = canvas("Where a step's time goes", label, 9.6, 1.7 + 0.46 * len(hooks))
        rows, left = list(range(len(hooks))), [0.0] * len(hooks)
        for part in PARTS:
            widths = [scale * one.parts[part] for one in hooks]
            axes.barh(rows, widths, left=left, height=0.62, color=getattr(LIGHT, part), label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for row, (one, total, (low, high)) in enumerate(zip(hooks, whole, spreads, strict=True)):
            end = min(scale * high, limit)
            axes.plot(
                [scale * low, end], [row, row], color=LIGHT.ink, linewidth=1.2, marker="|", markersize=7, zorder=3
            )
            end = max(left[row], end)
            versus = setting.versus.get(one.hook)
            faster = f"   {times(versus.step.mean)} as fast" if versus is not None and versus.step.seeds else ""
            text = f"  {seconds_in_words(total.mean)}{faster}"
            axes.annotate(text, (end, row), va="center", fontsize=9, color=LIGHT.ink)
        axes.set_yticks(rows, [shortened(one.hook, 40) for one in hooks])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.25 * limit)
        figure.legend(loc="outside lower left", ncols=len(PARTS))
        return png(figure)
