"""Which rank each layer gets, so that bytes buy as much as they can: a knapsack, by dynamic programming.

Source: Markov et al., "L-GreCo", MLSys 2024, algorithm 1, over bytes in the place of errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STEPS_OF_BUDGET = 1 << 13
"""A budget is spent in at most so many steps; prices are rounded up to whole ones, so it is never exceeded."""
_ROUNDING = 1e-12
"""Sums of one choice's gains may differ by this part, for they are added up in other orders."""


class Layer(NamedTuple):
    """What can be bought for one layer: its columns, the first ones first."""

    gains: Sequence[float]
    """How much less is unsent with each column."""
    cost: int
    """Of every column."""
    least: int
    """How many columns must be bought."""
    uniform: int
    """How many it has where all layers are treated alike."""


def least_error(layers: Sequence[Layer], budget: int) -> list[int]:
    """Return how many columns of each layer gain most together, for a budget; the least if that is too much for it."""
    table = _Table(layers, budget)
    affords = np.isfinite(table.best[-1])
    return table.bought_for(len(table.best) - 1) if affords else [layer.least for layer in layers]


def fewest_bytes(layers: Sequence[Layer]) -> list[int]:
    """Return how many columns of each layer gain as much as the uniform choice, and cost least.

    The uniform choice is returned if prices that are rounded up leave none that is cheaper.
    """
    table = _Table(layers, sum(layer.cost * layer.uniform for layer in layers))
    wanted = math.fsum(gain for layer in layers for gain in layer.gains[: layer.uniform]) * (1 - _ROUNDING)
    left = int(np.searchsorted(table.best, wanted))
    return table.bought_for(left) if left < len(table.best) else [layer.uniform for layer in layers]


class _Table:
    """What every part of a budget can buy."""

    def __init__(self, layers: Sequence[Layer], budget: int) -> None:
        self._layers = layers
        self._step = max(math.gcd(*(layer.cost for layer in layers)), -(-budget // STEPS_OF_BUDGET))
        self.best: NDArray[np.float64] = np.zeros(budget // self._step + 1)
        """By steps of the budget, not all of which need be spent: the most that they gain."""
        self._taken = []
        for layer in layers:
            counts = range(layer.least, len(layer.gains) + 1)
            options = np.full((len(counts), len(self.best)), -np.inf)
            for option, columns in zip(options, counts, strict=True):
                price = self._price(layer, columns)
                option[price:] = self.best[: max(0, len(self.best) - price)] + math.fsum(layer.gains[:columns])
            self._taken.append(options.argmax(axis=0) + layer.least)  # of equal ones the cheapest
            self.best = options.max(axis=0)

    def bought_for(self, steps: int) -> list[int]:
        """Return the columns of each layer that gain most for so many steps of the budget."""
        chosen: list[int] = []
        for layer, columns in zip(reversed(self._layers), reversed(self._taken), strict=True):
            chosen.append(int(columns[steps]))
            steps -= self._price(layer, chosen[-1])
        return chosen[::-1]

    def _price(self, layer: Layer, columns: int) -> int:
        """Return how many steps of the budget so many columns cost."""
        return -(-layer.cost * columns // self._step)
