"""The picture of a step's time: compute, compression and waiting."""

from __future__ import annotations

import matplotlib

from ..results.outcomes import PARTS, Setting
from .plots import LIGHT, canvas, png, style
from .words import seconds_in_words, shortened, times

_WHISKERS = {1: "", 2: " (whisker: from one seed to the other)"}  # by the number of seeds


def step_time(setting: Setting) -> bytes:
    """Return a PNG: the typical step of every hook, divided into its parts, with the interval of the whole."""
    hooks = setting.outcomes
    whole = [one.typical["seconds"] for one in hooks]
    top = max(one.ends[1] for one in whole)
    scale, unit = (1.0, "seconds") if top >= 2 else (1e3, "milliseconds")
    # One interval that is much wider than every bar must not squeeze the bars.
    limit = scale * min(top, 2 * max(one.mean for one in whole))
    with matplotlib.rc_context(style(LIGHT)):
        label = f"{unit} a step" + _WHISKERS.get(len(setting.seeds), " (whisker: 95 % interval over seeds)")
        figure, axes = canvas("Where a step's time goes", label, 9.6, 1.7 + 0.46 * len(hooks))
        rows, left = list(range(len(hooks))), [0.0] * len(hooks)
        for part in PARTS:
            widths = [scale * one.typical[part].mean for one in hooks]
            axes.barh(rows, widths, left=left, height=0.62, color=getattr(LIGHT, part), label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for row, (one, total) in enumerate(zip(hooks, whole, strict=True)):
            end = left[row]
            if total.seeds > 1:
                low, high = scale * max(0.0, total.ends[0]), min(scale * total.ends[1], limit)
                axes.plot([low, high], [row, row], color=LIGHT.ink, linewidth=1.2, marker="|", markersize=7, zorder=3)
                end = max(end, high)
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
