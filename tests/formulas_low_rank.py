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
            k, n, m = matrices_of(parameter)
            factors = k * (n + m) * min(n, m, self.rank)
            width = parameter.element_size()
            total += factors * max(width, 4) if 2 * factors < k * n * m else parameter.numel() * width
        return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class SketchBytes:
    """n·r for a matrix that this makes twice smaller; the rest whole, as wide as what is beside it."""

    rank: int

    def __call__(self, parameters: Sequence[Tensor], step: int, world_size: int) -> int:
        shapes = [matrices_of(p) for p in parameters]
        sent = [k * n * min(n, m, self.rank) for k, n, m in shapes]
        compressed = [2 * own < math.prod(shape) for own, shape in zip(sent, shapes, strict=True)]
        width = max(parameters[0].element_size(), 4 if any(compressed) else 0)
        each = zip(parameters, sent, compressed, strict=True)
        return width * sum(own if is_sketched else p.numel() for p, own, is_sketched in each)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveRankBytes:
    """(n + m)·r for each matrix that PowerSGD would compress at `rank`; the rest whole, as wide as what is beside it.

    r: in two of `every` steps the highest that makes the matrix twice smaller, up to `max_rank`; otherwise `rank` on
    average over all elements that are sent, or fewer.
    """

    rank: int
    max_rank: int
    every: int

    def __call__(self, parameters: Sequence[Tensor], step: int, world_size: int) -> int:
        is_wide = step % self.every < 2
        return self._bytes(parameters, self.max_rank if is_wide else self.rank)

    def _bytes(self, parameters: Sequence[Tensor], rank: int, riders: int = 0) -> int:
        elements, any_compressed = 0, False
        for parameter in parameters:
            k, n, m = matrices_of(parameter)
            if 2 * (n + m) * min(n, m, self.rank) < n * m:
                paying = [r for r in range(1, min(n, m, rank) + 1) if 2 * (n + m) * r < n * m]
                elements += k * (n + m) * paying[-1] + riders
                any_compressed = True
            else:
                elements += parameter.numel()
        return elements * max(parameters[0].element_size(), 4 if any_compressed else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccordionBytes(AdaptiveRankBytes):
    """The same where a norm that was never measured counts as changed, and no later one does; a norm is one element."""

    def __call__(self, parameters: Sequence[Tensor], step: int, world_size: int) -> int:
        is_high = 0 < step <= self.every
        return self._bytes(parameters, self.max_rank if is_high else self.rank, riders=int(step % self.every == 0))


def matrices_of(parameter: Tensor) -> tuple[int, int, int]:
    """Return the number of a parameter's matrices, and their rows and columns; (1, 0, 0) for a vector.

    It is one for each index of the leading dimensions if they have fewer rows and columns together than the first
    dimension against the rest.
    """
    if parameter.dim() < 2 or not parameter.numel():
        return 1, 0, 0
    n = parameter.shape[0]
    m = parameter.numel() // n
    *leading, rows, columns = parameter.shape
    k = math.prod(leading)
    return (k, rows, columns) if k * (rows + columns) < n + m else (1, n, m)
