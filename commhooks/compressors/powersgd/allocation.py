"""Which rank each layer gets, so that a budget buys as much as it can: a knapsack, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

STEPS_OF_BUDGET = 1 << 13
"""A budget is spent in at most so many steps; prices are rounded up to whole ones, so it is never exceeded."""
_ROUNDING = 1e-12
"""Sums of one choice's gains may differ by this part, for they are added up in other orders."""


class Layer(NamedTuple):
    """What can be bought for one layer: its columns, the first ones first, and at least one."""

    gains: Sequence[float]
    """How much less is unsent with each column."""
    cost: int
    """Of every column."""
    uniform: int
    """How many columns it has where all layers are treated alike."""


def allocate(layers: Sequence[Layer], keep: Literal["cost", "gain"]) -> list[int]:
    """Return how many columns of each layer gain most at the cost of the uniform choice, or cost least for its gain.

    The uniform choice itself is returned where prices that are rounded up leave nothing as good.
    """
    uniform = [layer.uniform for layer in layers]
    budget = sum(layer.cost * layer.uniform for layer in layers)
    step = max(math.gcd(*(layer.cost for layer in layers)), -(-budget // STEPS_OF_BUDGET))
    best = np.zeros(budget // step + 1)  # by steps of the budget: the most that they can buy for the layers so far
    taken = []
    for layer in layers:
        options = np.full((len(layer.gains), len(best)), -np.inf)
        for columns, gain in enumerate(np.cumsum(layer.gains), start=1):
            price = _price(layer, columns, step)
            options[columns - 1, price:] = best[: max(0, len(best) - price)] + gain
        taken.append(options.argmax(axis=0) + 1)  # of equal ones the cheapest
        best = options.max(axis=0)

    wanted = math.fsum(sum(layer.gains[: layer.uniform]) for layer in layers) * (1 - _ROUNDING)
    left = len(best) - 1 if keep == "cost" else int(np.searchsorted(best, wanted))
    if left == len(best) or best[left] < wanted:
        return uniform
    chosen: list[int] = []
    for layer, columns in zip(reversed(layers), reversed(taken), strict=True):
        chosen.append(int(columns[left]))
        left -= _price(layer, chosen[-1], step)
    return chosen[::-1]


def _price(layer: Layer, columns: int, step: int) -> int:
    """Return how many steps of the budget so many columns cost."""
    return -(-layer.cost * columns // step)
