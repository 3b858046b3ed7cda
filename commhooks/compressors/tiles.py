"""Square pieces of a parameter, for compressors that process a gradient piece by piece."""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch import Tensor
from torch.nn.functional import pad

from commhooks.compressors.powersgd.matrices import MatrixForm, form_of

MeanOver = Literal["ranks", "senders"]
"""What an element's sum is divided by: the number of all ranks, or of those that sent the element."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A grid of Y·X tiles a×b over a matrix n×m that is padded with zeros at its end."""

    elements: int
    """The parameter's elements, at most n·m."""
    form: MatrixForm
    a: int
    b: int

    @classmethod
    def of(cls, parameter: Tensor, side: int) -> Tiling:
        """Return as few equal tiles as possible, of at most side×side elements, for a non-empty parameter.

        A parameter is a matrix of its first dimension against the rest. One that is too narrow for a square tile, such
        as a vector, is arranged as rows of `side` elements instead. Rows and columns are distributed evenly, so that
        the padding is less than one row and one column of each tile.
        """
        form = form_of(parameter, "first-dimension")
        if form is None or min(form.n, form.m) < side:
            form = MatrixForm(-(-parameter.numel() // side), _evenly(parameter.numel(), side))
        return cls(parameter.numel(), form, _evenly(form.n, side), _evenly(form.m, side))

    @property
    def grid(self) -> tuple[int, int]:
        """Y and X: the number of tiles vertically and horizontally."""
        return -(-self.form.n // self.a), -(-self.form.m // self.b)

    @property
    def count(self) -> int:
        """The number of tiles."""
        return self.grid[0] * self.grid[1]

    def cut(self, memory: Tensor) -> Tensor:
        """Return the tiles [Y·X, a, b] of 1-D memory, in new memory."""
        (n, m, _), (Y, X) = self.form, self.grid
        matrix = self.form.view(pad(memory, (0, n * m - self.elements)))
        whole = pad(matrix, (0, X * self.b - m, 0, Y * self.a - n))
        return whole.reshape(Y, self.a, X, self.b).transpose(1, 2).reshape(Y * X, self.a, self.b)

    def join(self, tiles: Tensor) -> Tensor:
        """Return the elements of tiles [Y·X, a, b], 1-D, without the padding."""
        (n, m, transposed), (Y, X) = self.form, self.grid
        whole = tiles.view(Y, X, self.a, self.b).transpose(1, 2).reshape(Y * self.a, X * self.b)
        matrix = whole[:n, :m]
        return (matrix.t() if transposed else matrix).reshape(-1)[: self.elements]


def senders(values: Tensor, places: Tensor, elements: int) -> Tensor:
    """Return how many ranks have sent something other than zero to each of the places [W, T, k] of tiles; at least 1.

    A rank sends no place twice.
    """
    W, T, k = places.shape
    of_tiles = places.long().transpose(0, 1).reshape(T, W * k)
    sent = (values != 0).to(values.dtype).transpose(0, 1).reshape(T, W * k)
    numbers = values.new_zeros(T, elements).scatter_add_(1, of_tiles, sent).gather(1, of_tiles)
    return numbers.view(T, W, k).transpose(0, 1).clamp(min=1)


def _evenly(length: int, side: int) -> int:
    """Return the length of the pieces when a length is divided into as few as possible, none longer than `side`."""
    pieces = -(-length // side)
    return -(-length // pieces)
