"""Payload bytes of low-rank compressors other than PowerSGD, written from their papers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredFactorsBytes:
    """(n + m)·r in at least 4 bytes for a matrix that this makes twice smaller; the rest as it is."""

    rank: int

    def __call__(self, parameters: Sequence[Tensor], step: int, world_size: int) -> int:
        total = 0
        for parameter in parameters:
            n, m = sides(parameter)
            factors = (n + m) * min(n, m, self.rank)
            width = parameter.element_size()
            total += factors * max(width, 4) if 2 * factors < n * m else parameter.numel() * width
        return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class SketchBytes:
    """n·r for a matrix that this makes twice smaller; the rest whole, as wide as what is beside it."""

    rank: int

    def __call__(self, parameters: Sequence[Tensor], step: int, world_size: int) -> int:
        sent = [sides(p)[0] * min(*sides(p), self.rank) for p in parameters]
        compressed = [2 * own < math.prod(sides(p)) for own, p in zip(sent, parameters, strict=True)]
        width = max(parameters[0].element_size(), 4 if any(compressed) else 0)
        each = zip(parameters, sent, compressed, strict=True)
        return width * sum(own if is_sketched else p.numel() for p, own, is_sketched in each)


def sides(parameter: Tensor) -> tuple[int, int]:
    """Return rows and columns, the first dimension against the rest; (0, 0) for a vector."""
    if parameter.dim() < 2 or not parameter.numel():
        return 0, 0
    return parameter.shape[0], parameter.numel() // parameter.shape[0]
