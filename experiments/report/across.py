"""Pictures across settings: where compression begins to pay, by rate and by number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ..links.link import LinkSettings, format_rate
from ..results.outcomes import Setting
from ..runs import RunSettings
from .findings import distinguished
from .plots import LIGHT, Look, canvas, legend, png, style


@dataclass(frozen=True)
class Series:
    """Settings that differ in one number only, which grows."""

    along: str  # "rate" or "ranks"
    name: str  # what distinguishes it from others along the same
    settings: tuple[Setting, ...]
    places: tuple[float, ...]  # bits per second, or ranks


def series_of(settings: Sequence[Setting]) -> list[Series]:
    """Return the series of at least two settings."""
    by_rate: dict[RunSettings, list[Setting]] = {}
    by_ranks: dict[RunSettings, list[Setting]] = {}
    for one in settings:
        if one.baseline is None:
            continue
        link = one.settings.link
        plain = LinkSettings(kind=link.kind, bits_per_second=link.bits_per_second, latency_seconds=link.latency_seconds)
        if link.bits_per_second is not None and link == plain:
            anywhere = dataclasses.replace(plain, bits_per_second=1e6)
            by_rate.setdefault(dataclasses.replace(one.settings, link=anywhere), []).append(one)
        by_ranks.setdefault(dataclasses.replace(one.settings, ranks=1), []).append(one)
    return [
        *_series("rate", by_rate, lambda one: one.link.bits_per_second or 0.0),
        *_series("ranks", by_ranks, lambda one: float(one.ranks)),
    ]


def speed_ups(series: Series, drawn: Mapping[str, Look]) -> bytes:
    """Return a PNG: every hook's step speed-up along the series, and the line below which the baseline is faster."""
    baseline = series.settings[0].baseline
    assert baseline is not None, "series_of leaves out settings without one"
    hooks = list(dict.fromkeys(hook for one in series.settings for hook in one.versus))
    with matplotlib.rc_context(style(LIGHT)):
        rate = series.along == "rate"
        label = "rate of the link (logarithmic)" if rate else "ranks (logarithmic)"
        title = f"Step speed-up against {series.along}" + (f" ({series.name})" if series.name else "")
        figure, axes = canvas(title, label, 6.4, 4.6)
        for number, hook in enumerate(hooks):
            _hook(axes, series, hook, number - (len(hooks) - 1) / 2, drawn[hook])
        axes.axhline(1, color=LIGHT.ink, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.annotate(
            f"below: {baseline.hook} is faster", (0.01, 1), xycoords=("axes fraction", "data"), xytext=(0, -4),
            textcoords="offset points", va="top", fontsize=8, color=LIGHT.ink,
        )  # fmt: skip
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        low, high = min(low, 0.6), max(1.15 * high, 1.5)
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylabel(f"times as fast as {baseline.hook}")
        axes.set_xscale("log")
        names = [format_rate(place) if rate else f"{place:g}" for place in series.places]
        axes.set_xticks(series.places, names)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.12)
        legend(figure, axes)
        return png(figure)


def _hook(axes: Axes, series: Series, hook: str, offset: float, look: Look) -> None:
    """Draw one hook's curve, moved a little aside so that its whiskers do not hide another's."""
    known = [
        (place, one.versus[hook].step)
        for place, one in zip(series.places, series.settings, strict=True)
        if hook in one.versus and one.versus[hook].step.seeds
    ]
    xs = [place * 1.012**offset for place, _ in known]
    ys = [found.mean for _, found in known]
    axes.plot(
        xs, ys, color=look.colour, linestyle=look.dashes, linewidth=1.6, marker="o", markersize=4, label=look.label
    )
    for x, (_, found) in zip(xs, known, strict=True):
        if found.seeds > 1:
            axes.plot([x, x], found.ends, color=look.colour, linewidth=1.0)


def _series(
    along: str, grouped: Mapping[RunSettings, list[Setting]], place: Callable[[RunSettings], float]
) -> list[Series]:
    kept = {common: own for common, own in grouped.items() if len({place(one.settings) for one in own}) > 1}
    names = distinguished(list(kept)) if len(kept) > 1 else [""]
    found = []
    for name, own in zip(names, kept.values(), strict=False):
        own.sort(key=lambda one: place(one.settings))
        found.append(Series(along, name, tuple(own), tuple(place(one.settings) for one in own)))
    return found
