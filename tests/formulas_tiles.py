"""Bytes on the wire of compressors that cut parameters into tiles, counted from their papers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from torch import Tensor

from tests.formulas_low_rank import matrices_of


def tiles_of(parameter: Tensor, chunk: int) -> tuple[int, int]:
    """Return how many tiles a parameter has, and of how many elements, for memory in the order of dimensions."""
    elements = parameter.numel()
    k, n, m = matrices_of(parameter) if parameter.dim() > 1 else (1, 1, elements)
    sides = [k * n, m]
    if min(sides) < chunk:
        n = math.ceil(elements / chunk)
        sides = [n, math.ceil(elements / n)]
    numbers = [math.ceil(side / chunk) for side in sides]
    return math.prod(numbers), math.prod(math.ceil(side / of) for side, of in zip(sides, numbers, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseLoCoBytes:
    """Of each tile k places, of as many bits as its elements need, and 2 bits each; four means of each parameter."""

    k: int
    chunk: int

    def __call__(self, parameters: Sequence[Tensor], step: int, world_size: int) -> int:
        width = max(parameters[0].element_size(), 4)
        filled = [parameter for parameter in parameters if parameter.numel()]
        of_tiles = [tiles_of(parameter, self.chunk) for parameter in filled]
        sent = sum(tiles * min(self.k, elements) for tiles, elements in of_tiles)
        total = len(filled) * 4 * width + math.ceil(sent * math.log2(self.chunk**2) / 8) + math.ceil(sent * 2 / 8)
        return math.ceil(total / width) * width


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeMoBytes:
    """Of each tile k values and k places of 2 bytes; or k places and k bits, with one number for the bucket.

    A parameter that would take more than in fp32 is sent as it is, unless it is sent as bits.
    """

    k: int
    chunk: int
    one_bit: bool = False

    def __call__(self, parameters: Sequence[Tensor], step: int, world_size: int) -> int:
        width = max(parameters[0].element_size(), 4)
        total = width if self.one_bit else 0
        for parameter in parameters:
            if parameter.numel():
                tiles, elements = tiles_of(parameter, self.chunk)
                sent = tiles * min(self.k, elements)
                if self.one_bit:
                    total += 2 * sent + math.ceil(sent / 8)
                else:
                    total += (2 + width) * sent if 6 * sent <= 4 * parameter.numel() else width * parameter.numel()
        return math.ceil(total / width) * width
