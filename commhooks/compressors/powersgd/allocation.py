"""The distribution of bytes over the layers' ranks for the largest gain: a knapsack, by dynamic programming.

Source: Markov et al., "L-GreCo", MLSys 2024, algorithm 1, with bytes in place of errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STEPS_OF_BUDGET = 1 << 13
"""A budget is divided into at most this many units; prices are rounded up to whole units, so it is never exceeded."""
_ROUNDING = 1e-12
"""The relative difference allowed between sums of the same gains, which are added in different orders."""


class Layer(NamedTuple):
    """The columns that can be bought for a layer, in order."""

    gains: Sequence[float]
    """The reduction of the unsent part by each column."""
    cost: int
    """The price of each column."""
    least: int
    """The number of columns that must be bought."""
    uniform: int
    """The number of its columns if all layers get the same rank."""


def least_error(layers: Sequence[Layer], budget: int) -> list[int]:
    """Return the numbers of columns, by layer, that gain most within a budget; the minimum if that exceeds it."""
    table = _Table(layers, budget)
    affords = np.isfinite(table.best[-1])
    return table.bought_for(len(table.best) - 1) if affords else [layer.least for layer in layers]


def fewest_bytes(layers: Sequence[Layer]) -> list[int]:
    """Return the cheapest numbers of columns, by layer, that gain as much as the uniform choice.

    If rounding prices up leaves no cheaper choice, the uniform one is returned.
    """
    table = _Table(layers, sum(layer.cost * layer.uniform for layer in layers))
    wanted = math.fsum(gain for layer in layers for gain in layer.gains[: layer.uniform]) * (1 - _ROUNDING)
    left = int(np.searchsorted(table.best, wanted))
    return table.bought_for(left) if left < len(table.best) else [layer.uniform for layer in layers]


class _Table:
    """The largest gains, and their columns, for each amount up to the budget."""

    def __init__(self, layers: Sequence[Layer], budget: int) -> None:
        self._layers = layers
        self._step = max(math.gcd(*(layer.cost for layer in layers)), -(-budget // STEPS_OF_BUDGET))
        self.best: NDArray[np.float64] = np.zeros(budget // self._step + 1)
        """The largest gain by units of the budget, not all of which need be spent."""
        self._taken = []
        for layer in layers:
            counts = range(layer.least, len(layer.gains) + 1)
            options = np.full((len(counts), len(self.best)), -np.inf)
            for option, columns in zip(options, counts, strict=True):
                price = self._price(layer, columns)
                option[price:] = self.best[: max(0, len(self.best) - price)] + math.fsum(layer.gains[:columns])
            self._taken.append(options.argmax(axis=0) + layer.least)  # the cheapest of equal ones
            self.best = options.max(axis=0)

    def bought_for(self, steps: int) -> list[int]:
        """Return the numbers of columns, by layer, that gain most for `steps` units of the budget."""
        chosen: list[int] = []
        for layer, columns in zip(reversed(self._layers), reversed(self._taken), strict=True):
            chosen.append(int(columns[steps]))
            steps -= self._price(layer, chosen[-1])
        return chosen[::-1]

    def _price(self, layer: Layer, columns: int) -> int:
        """Return the price of `columns` columns, in units of the budget."""
        return -(-layer.cost * columns // self._step)
