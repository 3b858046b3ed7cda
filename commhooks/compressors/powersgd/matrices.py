"""The rules by which a bucket of gradients becomes matrices, as pure functions of shapes and strides."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from torch import Tensor

from commhooks.tensors import memory_order

MatrixRule = Literal["first-dimension", "most-square", "whole-bucket"]


class MatrixForm(NamedTuple):
    """A view of a range of memory as a matrix n×m: row by row or, if `transposed`, column by column."""

    n: int
    m: int
    transposed: bool = False

    def view(self, memory: Tensor) -> Tensor:
        """View 1-D memory of n·m elements as the matrix, without copying."""
        return memory.view(self.m, self.n).t() if self.transposed else memory.view(self.n, self.m)

    def is_reduced_by(self, elements: int, rate: float) -> bool:
        """Return whether the matrix has more than `rate` · `elements` elements (`rate` at least 1)."""
        return elements * max(rate, 1.0) < self.n * self.m


def error_of_rank(rank: int, elements: int) -> float:
    """Return the largest error of rank r for a matrix of `elements` elements, in squared norms: a square one's."""
    width = max(1, math.isqrt(elements))
    return 1 - min(rank, width) / width


def form_of(parameter: Tensor, rule: str) -> MatrixForm | None:
    """Return the form in which a parameter's gradient, in its memory order, is a matrix; None for a vector.

    "first-dimension" is the first dimension against the rest. Columns come in memory order, so a channels-last tensor
    also forms a matrix; if the first dimension is neither the outermost nor the innermost in memory, the outermost one
    is used instead. "most-square" splits the dimensions, in memory order, so that n + m is smallest.
    """
    shape, elements = parameter.shape, parameter.numel()
    if len(shape) < 2 or elements == 0:
        return None
    order = memory_order(parameter)
    sizes = [shape[dimension] for dimension in order]
    if rule == "most-square":
        splits = [math.prod(sizes[:split]) for split in range(len(sizes))]
        rows = min(splits, key=lambda n: n + elements // n, default=1)
        return MatrixForm(rows, elements // rows)
    if shape[0] == 1 or order[0] == 0:
        return MatrixForm(shape[0], elements // shape[0])
    if order[-1] == 0:
        return MatrixForm(shape[0], elements // shape[0], transposed=True)
    return MatrixForm(sizes[0], elements // sizes[0])


def form_of_bucket(elements: int, rank: int) -> MatrixForm:
    """Return the nearly square matrix that holds all but the last, fewer than `m`, of `elements` elements.

    Among the widths slightly below the square root, this is the one with the fewest elements in the factors of this
    rank and the remainder together, so no bucket is padded or copied.
    """
    root = max(1, math.isqrt(elements))
    widths = range(max(1, root - root // 8), root + 1)
    m = min(widths, key=lambda width: (elements // width + width) * rank + elements % width)
    return MatrixForm(elements // m, m)
