"""Medians with their quartiles, in cells of tables and in pictures."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from commhooks.units import three_digits

from ...summary import Spread


def milliseconds(spread: Spread) -> str:
    """Return '98.1 (95.0 to 104)' for seconds, in milliseconds."""
    median, low, high = (three_digits(1e3 * each) for each in (spread.median, spread.low, spread.high))
    return f"{median} ({low} to {high})"


def percent(spread: Spread) -> str:
    """Return '38.1 (36.9 to 40.2)' for shares."""
    median, low, high = (f"{100 * each:.1f}" for each in (spread.median, spread.low, spread.high))
    return f"{median} ({low} to {high})"


def factor(spread: Spread) -> str:
    """Return '1.62 (1.60 to 1.65)'."""
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def draw_spreads(axes: Axes, places: Sequence[float], spreads: Sequence[Spread], *, colour: str, label: str) -> None:
    """Draw medians in milliseconds, of seconds, with bars from quartile to quartile."""
    medians = [1e3 * each.median for each in spreads]
    below = [1e3 * (each.median - each.low) for each in spreads]
    above = [1e3 * (each.high - each.median) for each in spreads]
    axes.errorbar(places, medians, yerr=[below, above], color=colour, marker="o", markersize=4, capsize=3, label=label)
