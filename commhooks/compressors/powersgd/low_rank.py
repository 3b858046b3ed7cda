"""What a low-rank compressor lays out for one matrix: blocks of rows, and its two factors.

Legend: M n×m a gradient plus its residual; P r×n the left factor and Q r×m the right one, both kept transposed, for
products over rows of M are the fast ones; r the rank. A product's last bits depend on where its operands lie, in a way
of each processor's own: equal bits are promised for buckets that are laid out alike, and nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from commhooks.compressors.powersgd.matrices import MatrixForm
from commhooks.language.bucket import Slot, Tile
from commhooks.language.requests import Layout, Part
from commhooks.tensors import computing_dtype

Side = Literal["P", "Q"]
OTHER: dict[Side, Side] = {"P": "Q", "Q": "P"}

BLOCK_ELEMENTS = 1 << 18
"""Large matrices are worked on in blocks of rows of at most so many elements a thread, unless a row has more."""
TILE_ROWS = 16
"""The rows that a BLAS multiplies at once, or a multiple of them."""


class Block(NamedTuple):
    """Some rows of a matrix, as views that are made once."""

    tile: Tile
    """rows×m."""
    P: Tensor
    """r×rows, columns of the matrix's own P."""


class LowRankMatrix:
    """The views of one matrix: its blocks, its factors, and the slot that remembers its bases."""

    def __init__(self, key: str, form: MatrixForm, rank: int, tile: Tile, home: Slot, *, layout: Layout | None) -> None:
        self.key = key
        """Seeds the bases."""
        self.n, self.m = form.n, form.m
        self.r = min(self.n, self.m, rank)
        self.home = home
        gradient = tile.gradient
        self.P = gradient.new_zeros(self.r, self.n, dtype=computing_dtype(gradient.dtype))
        self.Q = gradient.new_zeros(self.r, self.m, dtype=computing_dtype(gradient.dtype))
        factors: dict[Side, Tensor] = {"P": self.P, "Q": self.Q}
        self.parts = {side: Part(own, layout or home.layout(own.numel())) for side, own in factors.items()}
        threads = 1 if gradient.is_cuda else torch.get_num_threads()
        self.block_rows = min(self.n, rows_of_a_block(self.m, 1 if gradient.is_cuda else self.r, threads))
        tiles = tile.rows(form, self.block_rows)
        self.blocks: Sequence[Block] = list(map(Block, tiles, self.P.split(self.block_rows, dim=1)))

    def factor(self, side: Side) -> Tensor:
        """Return P or Q."""
        return self.P if side == "P" else self.Q

    def multiply(self, side: Side) -> None:
        """Write this rank's own factor of one side, M times the other side's."""
        if side == "P":
            for block in self.blocks:
                torch.mm(self.Q, block.tile.form().t(), out=block.P)  # r×m · m×rows
        else:
            self.Q.zero_()
            for block in self.blocks:
                self.Q.addmm_(block.P, block.tile.form())  # r×rows · rows×m

    def largest_mean(self, P: Tensor, Q: Tensor) -> Tensor:
        """Return the largest magnitude of P·Q, 0-dim; P is n×r here. What was formed elsewhere is formed anew after."""
        of_blocks = zip(P.split(self.block_rows), self.blocks, strict=True)
        return torch.stack([torch.mm(rows, Q, out=block.tile.room).abs().amax() for rows, block in of_blocks]).amax()


def rows_of_a_block(m: int, r: int, threads: int) -> int:
    """Return how many rows of a matrix of width m are worked on at a time, which the cores then keep in their caches.

    Several threads share a block's rows or columns as their BLAS decides, and each needs enough of them. On one thread,
    products with one row or column stream through memory; those with more go through a block a few columns at a time:
    if it has few rows, a multiple of those that a BLAS takes at once, they are read like so many streams. (All rows of
    a 768×3072 matrix at once took 1.8 times as long at rank 4.)
    """
    most = max(1, threads * BLOCK_ELEMENTS // m)
    if r == 1 or threads > 1:
        return most
    return min(most, max(TILE_ROWS, BLOCK_ELEMENTS // 4 // m // TILE_ROWS * TILE_ROWS))
