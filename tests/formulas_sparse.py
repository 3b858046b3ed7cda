"""Bytes on the wire of compressors that send some of the elements, from their papers and the layout of messages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from torch import Tensor

from tests.formulas_low_rank import matrices_of

SHAPES_OF_INDICES: dict[str, tuple[int | None, Callable[[int, int], int]]] = {
    "int32": (None, lambda n, k: 4 * k),
    "block-12": (4096, lambda n, k: k + math.ceil(k / 2)),
    "block-16": (65536, lambda n, k: 2 * k),
    "bitmap": (65536, lambda n, k: math.ceil(n / 8)),
}
"""The elements of a block, of which each sends its share; and the bytes of k indices into n elements."""


def sent_of(n: int, ratio: float, block: int | None) -> int:
    """Return how many of n elements are sent if each block sends at least so large a part of its own."""
    block = block or n
    return sum(math.ceil(ratio * min(block, n - start)) for start in range(0, n, block))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatheredBytes:
    """A value of at least 4 bytes for each element that is sent, and indices; rows end where values may begin.

    Parameters whose indices have one form share a code.
    """

    ratio: float
    indices: str = "auto"
    ratios: Sequence[float] = ()
    """Those of the first steps, where they differ."""

    def __call__(self, parameters: Sequence[Tensor], step: int, world_size: int) -> int:
        width = max(parameters[0].element_size(), 4)
        ratio = self.ratios[step] if step < len(self.ratios) else self.ratio
        total, alike = 0, dict[str, list[tuple[int, int]]]()
        for n in [p.numel() for p in parameters if p.numel()]:
            sent = {name: sent_of(n, ratio, block) for name, (block, _) in SHAPES_OF_INDICES.items()}
            sizes = {name: k * width + SHAPES_OF_INDICES[name][1](n, k) for name, k in sent.items()}
            name = self.indices if self.indices in sizes else min(sizes, key=sizes.__getitem__)
            total += sent[name] * width
            alike.setdefault(name, []).append((n, sent[name]))
        for name, of_parameters in alike.items():
            n, k = map(sum, zip(*of_parameters, strict=True))
            total += SHAPES_OF_INDICES[name][1](n, k)
        return math.ceil(total / width) * width


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummedBytes:
    """Values of at least 4 bytes, and one more for each parameter, which tells of an inf that is not sent."""

    ratio: float

    def __call__(self, parameters: Sequence[Tensor], step: int, world_size: int) -> int:
        width = max(parameters[0].element_size(), 4)
        return sum((math.ceil(self.ratio * p.numel()) + 1) * width for p in parameters if p.numel())


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
