"""The rules by which a bucket of gradients becomes matrices, pure functions of shapes and strides, and which pay."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal, NamedTuple

from torch import Tensor

from commhooks.language import Compressor, Place
from commhooks.tensors import memory_order

MatrixRule = Literal["stacked", "first-dimension", "most-square", "whole-bucket"]


class MatrixForm(NamedTuple):
    """A view of a range of memory as a matrix n×m: row by row or, if `transposed`, column by column.

    If `stack` is given, it is that many such matrices, one after another.
    """

    n: int
    m: int
    transposed: bool = False
    stack: int | None = None

    @property
    def matrices(self) -> int:
        """The number of matrices."""
        return 1 if self.stack is None else self.stack

    @property
    def elements(self) -> int:
        """The number of elements of all matrices."""
        return self.matrices * self.n * self.m

    def view(self, memory: Tensor) -> Tensor:
        """View 1-D memory as the matrix or, if `stack` is given, as its matrices [k, n, m], without copying."""
        numbers = () if self.stack is None else (self.stack,)
        return memory.view(*numbers, self.m, self.n).mT if self.transposed else memory.view(*numbers, self.n, self.m)


def error_of_rank(rank: int, elements: int) -> float:
    """Return the largest error of rank r for a matrix of `elements` elements, in squared norms: a square one's."""
    width = max(1, math.isqrt(elements))
    return 1 - min(rank, width) / width


def form_of(parameter: Tensor, rule: str) -> MatrixForm | None:
    """Return the form in which a parameter's gradient, in its memory order, is a matrix; None for a vector.

    "first-dimension" is the first dimension against the rest. Columns come in memory order, so a channels-last tensor
    also forms a matrix; if the first dimension is neither the outermost nor the innermost in memory, the outermost one
    is used instead. "most-square" splits the dimensions, in memory order, so that n + m is smallest. "stacked" is
    `stack_of` where its factors are smaller than those of the first dimension against the rest, as for the fused
    weights of experts, but not for convolutions.
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
        first = MatrixForm(shape[0], elements // shape[0])
    elif order[-1] == 0:
        first = MatrixForm(shape[0], elements // shape[0], transposed=True)
    else:
        first = MatrixForm(sizes[0], elements // sizes[0])
    stack = stack_of(parameter) if rule == "stacked" else None
    return first if stack is None or stack.matrices * (stack.n + stack.m) >= first.n + first.m else stack


def stack_of(parameter: Tensor) -> MatrixForm | None:
    """Return the form in which a parameter's last two dimensions are matrices, and the others their numbers.

    None for a vector or a matrix, and if a matrix is not one range of memory.
    """
    if parameter.dim() < 3 or not parameter.numel():
        return None
    *numbers, n, m = parameter.shape
    order, last = memory_order(parameter), len(numbers)
    leading = [dimension for dimension in order if dimension < last]
    if order[: len(leading)] != sorted(leading):
        return None
    count = math.prod(numbers)
    is_transposed = order[len(leading) :] == [last + 1, last]
    return MatrixForm(n, m, is_transposed, None if count == 1 else count)


def form_of_bucket(elements: int, rank: int) -> MatrixForm:
    """Return the nearly square matrix that holds all but the last, fewer than `m`, of `elements` elements.

    Among the widths slightly below the square root, this is the one with the fewest elements in the factors of this
    rank and the remainder together, so no bucket is padded or copied.
    """
    root = max(1, math.isqrt(elements))
    widths = range(max(1, root - root // 8), root + 1)
    m = min(widths, key=lambda width: (elements // width + width) * rank + elements % width)
    return MatrixForm(elements // m, m)


class OfMatrices(Compressor):
    """A compressor that sends something smaller in place of matrices, or else their elements."""

    min_compression_rate: float

    @abstractmethod
    def sent(self, form: MatrixForm) -> int:
        """Return the number of elements sent in place of one matrix."""

    def matrix(self, parameter: Tensor, name: str) -> MatrixForm | None:
        """Return the form in which a parameter's gradient is a matrix; None if it is none, or is not compressed."""
        return form_of(parameter, "stacked") if parameter.is_floating_point() else None

    def paying_form(self, parameter: Tensor, name: str = "") -> MatrixForm | None:
        """Return the matrix in whose place something smaller is sent; None if the gradient is sent otherwise."""
        form = self.matrix(parameter, name)
        return form if form is not None and self.pays(form) else None

    def pays(self, form: MatrixForm) -> bool:
        """Return whether the elements sent are more than `min_compression_rate` times fewer (at least 1)."""
        return self.sent(form) * max(self.min_compression_rate, 1.0) < form.n * form.m

    def why_whole(self, place: Place) -> str | None:
        """Return how many elements would be sent in place of a matrix, if these are too many."""
        form = self.matrix(place.parameter, place.name)
        if form is None or self.pays(form):
            return None
        times = f"{max(self.min_compression_rate, 1.0):g} times fewer"
        return f"{self.sent(form):,} elements would be sent of each matrix {form.n:,}×{form.m:,}, not {times}"
