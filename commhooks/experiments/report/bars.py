"""The picture of a step's time: compute, compression and waiting."""

from __future__ import annotations

from matplotlib.figure import Figure

from commhooks.experiments.report.plots import LIGHT, canvas
from commhooks.experiments.report.words import seconds_in_words, shortened
from commhooks.experiments.results.outcomes import PARTS, Setting


def step_time(setting: Setting) -> Figure:
    """Draw the typical step of every hook, divided into its parts, with the spread of the whole."""
    hooks = setting.outcomes
    several = len(setting.seeds) > 1
    # The quartiles of the steps of one seed; over several, the interval, or both values of two.
    spreads = [one.step.ends if several else (one.step_spread.low, one.step_spread.high) for one in hooks]
    longest = max(one.step.mean for one in hooks)
    scale, unit = (1.0, "seconds") if longest >= 2 else (1e3, "milliseconds")
    whisker = "95 % interval over seeds" if several else "the quartiles of its steps"
    title = "Where a step's time goes"
    figure, axes = canvas(title, f"{unit} a step (whisker: {whisker})", 9.6, 1.7 + 0.46 * len(hooks))
    rows, left = list(range(len(hooks))), [0.0] * len(hooks)
    for part in PARTS:
        widths = [scale * one.parts[part] for one in hooks]
        axes.barh(rows, widths, left=left, height=0.62, color=getattr(LIGHT, part), label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, (one, (low, high)) in enumerate(zip(hooks, spreads, strict=True)):
        end = scale * min(high, 2 * longest)  # one interval that is much wider than every bar must not squeeze them
        axes.plot([scale * low, end], [row, row], color=LIGHT.ink, linewidth=1.2, marker="|", markersize=7, zorder=3)
        text = f"  {seconds_in_words(one.step.mean)}"
        axes.annotate(text, (max(left[row], end), row), va="center", fontsize=9, color=LIGHT.ink)
    axes.set_yticks(rows, [shortened(one.hook, 40) for one in hooks])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.25 * scale * min(max(longest, *(high for _, high in spreads)), 2 * longest))
    figure.legend(loc="outside lower left", ncols=len(PARTS))
    return figure
