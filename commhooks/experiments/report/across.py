"""Pictures across settings: where compression begins to pay, by rate and by number of ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from commhooks.experiments.links.link import format_rate
from commhooks.experiments.report.findings import distinguished
from commhooks.experiments.report.plots import LIGHT, Look, canvas, legend
from commhooks.experiments.results.outcomes import Setting
from commhooks.experiments.runs import RunSettings


@dataclass(frozen=True)
class Series:
    """Settings that differ in one number only, which grows."""

    along: str  # "rate" or "ranks"
    name: str  # what distinguishes it from others along the same
    settings: tuple[Setting, ...]
    places: tuple[float, ...]  # bits per second, or ranks


def series_of(settings: Sequence[Setting]) -> list[Series]:
    """Return the series of at least two settings."""
    return [*_series("rate", settings), *_series("ranks", settings)]


def speed_ups(series: Series, drawn: Mapping[str, Look]) -> Figure:
    """Draw every hook's step speed-up along the series, and the line below which the baseline is faster."""
    baseline = series.settings[0].baseline
    assert baseline is not None, "series_of leaves out settings without one"
    hooks = list(dict.fromkeys(hook for one in series.settings for hook in one.judged))
    rate = series.along == "rate"
    title = f"Step speed-up against {series.along}" + (f" ({series.name})" if series.name else "")
    label = "rate of the link (logarithmic)" if rate else "ranks (logarithmic)"
    figure, axes = canvas(title, label, 6.4, 4.6)
    for number, hook in enumerate(hooks):
        _hook(axes, series, hook, number - (len(hooks) - 1) / 2, drawn[hook])
    axes.axhline(1, color=LIGHT.ink, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low := min(low, 0.6), high := max(1.15 * high, 1.5))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"times as fast as {baseline.hook}")
    axes.set_xscale("log")
    axes.set_xticks(series.places, [format_rate(place) if rate else f"{place:g}" for place in series.places])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.12)
    legend(figure, axes)
    return figure


def _hook(axes: Axes, series: Series, hook: str, offset: float, look: Look) -> None:
    """Draw one hook's curve, moved a little aside so that its whiskers do not hide another's."""
    known = [
        (place * 1.012**offset, one.judged[hook].speed_up)
        for place, one in zip(series.places, series.settings, strict=True)
        if hook in one.judged and math.isfinite(one.judged[hook].speed_up.mean)
    ]
    line = {"color": look.colour, "linestyle": look.dashes, "linewidth": 1.6, "marker": "o", "markersize": 4}
    axes.plot([x for x, _ in known], [found.mean for _, found in known], label=look.label, **line)
    for x, found in known:
        axes.plot([x, x], [found.low, found.high], color=look.colour, linewidth=1.0)


def _series(along: str, settings: Sequence[Setting]) -> list[Series]:
    grouped: dict[RunSettings, list[tuple[float, Setting]]] = {}
    for one in settings:
        rate = one.settings.link.bits_per_second
        if one.baseline is None or (along == "rate" and rate is None):
            continue
        others = dataclasses.replace(one.settings.link, bits_per_second=1e6)
        change = {"link": others} if along == "rate" else {"ranks": 1}
        common = dataclasses.replace(one.settings, **change)
        grouped.setdefault(common, []).append(((rate or 0.0) if along == "rate" else float(one.settings.ranks), one))
    kept = {common: own for common, own in grouped.items() if len({place for place, _ in own}) > 1}
    names = distinguished(list(kept)) if len(kept) > 1 else [""]
    found = []
    for name, own in zip(names, kept.values(), strict=False):
        places, ordered = zip(*sorted(own, key=lambda each: each[0]), strict=True)
        found.append(Series(along, name, ordered, places))
    return found
