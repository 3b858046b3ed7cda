"""Means over seeds with 95 % confidence intervals; two hooks are compared seed by seed.

One seed has a value, two have two values, and three or more have an interval. The interval of two values would extend
nine standard deviations to either side, and tell less than the values themselves.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

CONFIDENCE = 0.95
LEAST_SEEDS = 3  # with fewer there is no interval


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % confidence interval (Student's t)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the interval of at least two values; infinite if one of them is not finite."""
        mean = statistics.fmean(values)
        if not all(map(math.isfinite, values)):
            return cls(mean, -math.inf, math.inf)
        error = statistics.stdev(values) / math.sqrt(len(values))
        half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * error
        return cls(mean, mean - half, mean + half)

    @property
    def sign(self) -> int:
        """1 or -1 if zero lies outside the interval, otherwise 0."""
        return (self.low > 0) - (self.high < 0)

    def scaled(self, factor: float) -> Interval:
        """Return the estimate in other units."""
        return Interval(self.mean * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Estimate:
    """One quantity measured once per seed, with its mean and spread; seeds without a finite number are left out."""

    by_seed: Mapping[int, float]
    mean: float  # NaN if no seed has a number
    interval: Interval | None  # None: fewer than LEAST_SEEDS
    neutral: float = 0.0  # the value that means "no difference": 0 of a difference, 1 of a ratio

    @classmethod
    def of(cls, by_seed: Mapping[int, float]) -> Estimate:
        """Return the arithmetic mean with Student's t."""
        known = {seed: value for seed, value in by_seed.items() if math.isfinite(value)}
        mean = statistics.fmean(known.values()) if known else math.nan
        return cls(known, mean, Interval.of(list(known.values())) if len(known) >= LEAST_SEEDS else None)

    @classmethod
    def of_times(cls, by_seed: Mapping[int, float]) -> Estimate:
        """Return the geometric mean of times with Student's t on the logarithms.

        The ratio of two such means is then the mean of the ratios, seed by seed, that `of_ratios` returns.
        """
        logarithms = cls.of({seed: math.log(value) for seed, value in by_seed.items() if 0 < value < math.inf})
        found = logarithms.interval
        interval = None if found is None else Interval(*map(_exp, (found.mean, found.low, found.high)))
        return cls({seed: by_seed[seed] for seed in logarithms.by_seed}, _exp(logarithms.mean), interval)

    @classmethod
    def of_ratios(cls, by_seed: Mapping[int, float]) -> Estimate:
        """Return the geometric mean of ratios with Student's t on the logarithms.

        Twice as fast and half as fast are equally far from 1, which differences of ratios are not. A bootstrap of three
        seeds could not be wider than their range, which holds the true mean far less often than 95 times in 100.
        """
        return dataclasses.replace(cls.of_times(by_seed), neutral=1.0)

    @property
    def seeds(self) -> int:
        """The number of seeds it was measured with."""
        return len(self.by_seed)

    @property
    def sign(self) -> int | None:
        """1 or -1 if the whole interval, or both values of two seeds, lie above or below the neutral value; 0 if not.

        None for fewer than two seeds.
        """
        if self.seeds < 2:
            return None
        low, high = self.ends
        return (low > self.neutral) - (high < self.neutral)

    @property
    def ends(self) -> tuple[float, float]:
        """The ends of the interval; with fewer seeds than it needs, the least and the greatest value."""
        if self.interval is not None:
            return self.interval.low, self.interval.high
        return min(self.by_seed.values(), default=math.nan), max(self.by_seed.values(), default=math.nan)


def differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """Return by how much ours exceed theirs, for each seed that both have."""
    return {seed: value - theirs[seed] for seed, value in ours.items() if seed in theirs}


def ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    """Return ours over theirs, for each seed that both have."""
    return {seed: value / theirs[seed] for seed, value in ours.items() if theirs.get(seed)}


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)  # a double holds up to e^709
