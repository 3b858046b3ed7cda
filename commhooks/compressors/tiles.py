"""Square pieces of a parameter, for compressors that process a gradient piece by piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks.compressors.powersgd.matrices import MatrixForm, form_of
from commhooks.language import Slot, Tile
from commhooks.native.largest import Grid

MeanOver = Literal["ranks", "senders"]
"""The divisor of an element's sum: the number of all ranks, or of the ranks that sent the element."""


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
        """Return the fewest equal tiles, of at most side×side elements, for a non-empty parameter.

        A parameter is a matrix of its first dimension against the rest, or of the rows of all its matrices if it is a
        stack. One that is too narrow for a square tile, such as a vector, is arranged as rows of `side` elements
        instead. Rows and columns are distributed evenly, so that the padding is less than one row and one column of
        each tile.
        """
        form = form_of(parameter, "stacked")
        if form is not None and form.stack is not None:
            rows, columns = (form.m, form.n) if form.transposed else (form.n, form.m)
            form = MatrixForm(form.stack * rows, columns)
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

    @property
    def is_padded(self) -> bool:
        """True if the tiles have more elements than the parameter."""
        return self.count * self.a * self.b > self.elements

    def cut(self, memory: Tensor) -> Tensor:
        """Return the tiles [Y·X, a, b] of 1-D memory, in new memory."""
        (tiles,) = self.bands(memory, self.grid[0])
        return tiles.clone() if tiles.data_ptr() == memory.data_ptr() else tiles

    def bands(self, memory: Tensor, height: int) -> Iterator[Tensor]:
        """Return the tiles [.., a, b] of 1-D memory in the order of `cut`, `height` rows of the grid at a time.

        They are a view of the memory if their elements lie side by side in it.
        """
        (n, m, *_), (Y, X) = self.form, self.grid
        matrix = self.form.view(pad(memory, (0, n * m - self.elements)) if self.elements < n * m else memory)
        for first in range(0, Y, height):
            rows = min(height, Y - first)
            band = matrix[first * self.a : (first + rows) * self.a]
            if self.is_padded:
                band = pad(band, (0, X * self.b - m, 0, rows * self.a - len(band)))
            yield band.reshape(rows, self.a, X, self.b).transpose(1, 2).reshape(-1, self.a, self.b)

    def starts(self, dtype: torch.dtype) -> Tensor:
        """Return the index of each tile's first element in 1-D memory, [Y·X, 1]."""
        down, right = self._strides
        (Y, X) = self.grid
        rows, columns = (torch.arange(count, dtype=dtype, device="cpu") for count in (Y, X))
        return (rows.unsqueeze(1) * (self.a * down) + columns * (self.b * right)).view(-1, 1)

    def sides(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers of rows and columns of each tile that are no padding of the matrix, [2, Y·X, 1]."""
        (n, m, *_), (Y, X) = self.form, self.grid
        rows = (n - torch.arange(0, Y * self.a, self.a, dtype=dtype, device="cpu")).repeat_interleave(X)
        columns = (m - torch.arange(0, X * self.b, self.b, dtype=dtype, device="cpu")).repeat(Y)
        return torch.stack([rows, columns]).unsqueeze(2)

    def indices(self, places: Tensor, starts: Tensor, sides: Tensor) -> Tensor:
        """Return the indices into 1-D memory of places [..., Y·X, k] in the tiles; of padding, -1.

        `starts` are the results of `starts`, plus the index of the parameter's first element in that memory.
        """
        down, right = self._strides
        rows = places.div(self.b, rounding_mode="floor")
        found = rows * (down - self.b * right)
        found += places * right if right > 1 else places
        found += starts
        if self.is_padded:
            is_inside = (rows < sides[0]) & (places - rows * self.b < sides[1])
            if self.elements < self.form.n * self.form.m:
                is_inside &= found < starts[0] + self.elements
            found.masked_fill_(~is_inside, -1)
        return found

    def sending(self, k: int) -> Grid:
        """Return the tiles for compiled code, which sends k elements of each."""
        (n, m, *_), (_, X) = self.form, self.grid
        return Grid(self.a, self.b, X, n, m, *self._strides, self.elements, k)

    @property
    def _strides(self) -> tuple[int, int]:
        """The distances in memory between neighbours in a column, and in a row."""
        return (1, self.form.n) if self.form.transposed else (self.form.m, 1)

    def join(self, tiles: Tensor) -> Tensor:
        """Return the elements of tiles [Y·X, a, b], 1-D, without the padding."""
        (n, m, transposed, _), (Y, X) = self.form, self.grid
        whole = tiles.view(Y, X, self.a, self.b).transpose(1, 2).reshape(Y * self.a, X * self.b)
        matrix = whole[:n, :m]
        return (matrix.t() if transposed else matrix).reshape(-1)[: self.elements]


class TiledParameter(NamedTuple):
    """A parameter in tiles, and its place in a piece of memory and in a message."""

    slot: Slot
    number: int
    """Its index among the bucket's."""
    tiling: Tiling
    k: int
    """The number of elements sent of each tile."""
    starts: Tensor
    """[T, 1]: the index of each tile's first element in the piece's memory."""
    sides: Tensor
    """[2, T, 1]: the numbers of rows and columns of each tile that are no padding."""
    memory: slice
    entries: slice

    def indices(self, places: Tensor) -> Tensor:
        """Return the indices into the piece's memory of places [..., T·k] in tiles; of padding, -1."""
        return self.tiling.indices(places.unflatten(-1, (-1, self.k)), self.starts, self.sides).flatten(-2)


class TiledPiece(NamedTuple):
    """A range of memory with some parameters in tiles."""

    tile: Tile
    parameters: Sequence[TiledParameter]
    entries: slice
    runs: Sequence[int]
    """The numbers of entries to add at a time; see `add_in_rank_order`."""

    @property
    def is_padded(self) -> bool:
        """True if tiles have more elements than their parameters."""
        return any(one.tiling.is_padded for one in self.parameters)


def senders(values: Tensor, places: Tensor, elements: int) -> Tensor:
    """Return the number of ranks, at least 1, that have sent a nonzero value to each of the places [W, n].

    A rank may send several values to a place only if at most one is nonzero.
    """
    numbers = values.new_zeros(elements)
    for own, at in zip(values, places, strict=True):
        numbers.index_add_(0, at, (own != 0).to(values.dtype))
    return numbers.index_select(0, places.flatten()).view_as(values).clamp_(min=1)


def without_padding(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and indices with zeros for the first element in place of padding, whose index is -1."""
    return values.masked_fill(indices < 0, 0.0), indices.clamp(min=0)


def _evenly(length: int, side: int) -> int:
    """Return the length of the pieces when a length is divided into as few as possible, none longer than `side`."""
    pieces = -(-length // side)
    return -(-length // pieces)
