"""Medians of times that were measured in turns, and of their ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scipy import stats

from commhooks.experiments.results.intervals import CONFIDENCE
from commhooks.experiments.results.summary import Spread
from commhooks.units import three_digits


@dataclass(frozen=True)
class Ratio:
    """The median of ratios, turn by turn, with its 95 % confidence interval.

    The interval lies between two of the ratios, counted from either end (that of the sign test), so that a turn that
    was disturbed does not widen it. From 6 turns on it is finite.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """Return ours over theirs."""
        ratios = sorted(our / their for our, their in zip(ours, theirs, strict=True))
        count = len(ratios)
        place = int(stats.binom.ppf((1 - CONFIDENCE) / 2, count, 0.5))
        low, high = (ratios[place - 1], ratios[count - place]) if place else (0.0, math.inf)
        return cls(Spread.of(ratios).median, low, high)

    @property
    def sign(self) -> int:
        """1 or -1 if ours take longer or less, 0 if the interval holds 1: no difference was seen."""
        return (self.low > 1) - (self.high < 1)

    @property
    def text(self) -> str:
        """The ratio as in '1.23 (1.20 to 1.27)'."""
        interval = (
            f"{three_digits(self.low)} to {three_digits(self.high)}" if math.isfinite(self.high) else "too few turns"
        )
        return f"{three_digits(self.median)} ({interval})"


def milliseconds(seconds: Sequence[float]) -> str:
    """Return the median with its quartiles, as in '98.1 (95.0 to 104)'."""
    return with_quartiles(Spread.of(seconds), lambda value: three_digits(1e3 * value))


def with_quartiles(spread: Spread, form: Callable[[float], str]) -> str:
    """Return the median with the quartiles in parentheses."""
    return f"{form(spread.median)} ({form(spread.low)} to {form(spread.high)})"
