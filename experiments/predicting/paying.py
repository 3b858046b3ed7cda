"""The rates of the link at which one step is faster than another: below one, above one, between two, or nowhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .link import Link
from .predicting import Unlinked
from .step_time import StepTime

Rates = tuple[tuple[float, float], ...]
"""Ranges of rates in bits per second, ascending; 0 and `math.inf` stand for every lower and every higher one."""
RATES = (*np.geomspace(1e4, 1e14, 21).tolist(), math.inf)
"""Bits per second at which steps are compared; between two of them one change of the faster step is looked for."""
_TO_THE = 1e-4  # as a part of the rate


@dataclass(frozen=True)
class Case:
    """A step on a link, whose rate may be varied."""

    step: Unlinked
    link: Link

    def time(self, rate: float | None = None) -> StepTime:
        """Return the step's time, at the link's own rate or at another one."""
        link = self.link if rate is None else dataclasses.replace(self.link, rate=rate)
        return self.step.over(link).time

    def seconds(self, rates: Sequence[float]) -> list[float]:
        """Return the step's seconds at each rate."""
        return [self.time(rate).seconds for rate in rates]


def paying_rates(dense: Case, other: Case, rates: Sequence[float] = RATES, known: Sequence[float] = ()) -> Rates:
    """Return the ranges of rates in which the other step is faster than the dense one.

    Args:
        dense: The step to beat.
        other: On a link of the same rate.
        rates: Where both are computed, ascending. Two changes between neighbours are not noticed.
        known: The dense step's seconds there; empty: they are computed.

    """
    baseline = known or dense.seconds(rates)
    ahead = [own < its for own, its in zip(other.seconds(rates), baseline, strict=True)]
    edges = [0.0] if ahead[0] else []
    edges += [
        _change(dense, other, rates[place - 1], rates[place], is_ahead=ahead[place - 1])
        for place in range(1, len(rates))
        if ahead[place] != ahead[place - 1]
    ]
    edges += [math.inf] if ahead[-1] else []
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _change(dense: Case, other: Case, low: float, high: float, *, is_ahead: bool) -> float:
    """Return the rate at which the other step begins or ceases to be ahead, given whether it is at the lower rate."""
    while high / low > 1 + _TO_THE and high < math.inf:
        middle = math.sqrt(low * high)
        if (other.time(middle).seconds < dense.time(middle).seconds) == is_ahead:
            low = middle
        else:
            high = middle
    return low if math.isinf(high) else math.sqrt(low * high)
