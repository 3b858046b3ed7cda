"""What a low-rank compressor prepares for one matrix: blocks of rows, and its two factors.

Legend: M n×m a gradient plus its residual; P r×n the left factor and Q r×m the right one, both kept transposed, since
products along rows of M are faster; r the rank. The last bits of a product depend on where its operands lie in memory,
differently on each processor: only buckets with the same layout are promised to give the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from commhooks.compressors.powersgd.matrices import MatrixForm
from commhooks.compressors.powersgd.precision import in_full
from commhooks.language.bucket import BucketView, Slot, Tile
from commhooks.language.compressor import Context
from commhooks.language.requests import Layout, Part
from commhooks.tensors import computing_dtype

Item = TypeVar("Item")
Side = Literal["P", "Q"]
OTHER: dict[Side, Side] = {"P": "Q", "Q": "P"}

BLOCK_ELEMENTS = 1 << 18
"""Large matrices are processed in blocks of rows, of at most this many elements per thread, but at least one row."""
TILE_ROWS = 16
"""The number of rows that a BLAS multiplies at once, or a multiple of it."""


class Block(NamedTuple):
    """Some rows of a matrix, as views that are created once."""

    tile: Tile
    """rows×m."""
    P: Tensor
    """r×rows: the matching columns of the matrix's P."""


class LowRankMatrix:
    """The views of one matrix: its blocks, its factors, and the slot that holds its bases."""

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

    def narrowed(self, r: int) -> LowRankMatrix:
        """Return the same matrix with only the first r rows of its factors; they share memory."""
        if r == self.r:
            return self
        narrow = copy.copy(self)
        narrow.r, narrow.P, narrow.Q = r, self.P[:r], self.Q[:r]
        narrow.parts = {side: self.home.part(narrow.factor(side)) for side in self.parts}
        blocks = zip(self.blocks, narrow.P.split(self.block_rows, dim=1), strict=True)
        narrow.blocks = [Block(block.tile, P) for block, P in blocks]
        return narrow

    def factor(self, side: Side) -> Tensor:
        """Return P or Q."""
        return self.P if side == "P" else self.Q

    def multiply(self, side: Side) -> None:
        """Compute this rank's own factor of one side: M times the factor of the other side."""
        if side == "P":
            for block in self.blocks:
                torch.mm(self.Q, block.tile.form().t(), out=block.P)  # r×m · m×rows
        else:
            self.Q.zero_()
            for block in self.blocks:
                self.Q.addmm_(block.P, block.tile.form())  # r×rows · rows×m

    def finish(self, P: Tensor, Q: Tensor, P_sent: Tensor, Q_sent: Tensor, finite: Tensor) -> None:
        """Write the mean, P·Q, and the residual, M less what this rank has sent: P and P_sent are n×r here."""
        (P, Q), (P_sent, Q_sent) = in_full(P, Q), in_full(P_sent, Q_sent)  # no residual would hold their rounding error
        of_blocks = zip(self.blocks, P.split(self.block_rows), P_sent.split(self.block_rows), strict=True)
        for (tile, _), rows, sent_rows in of_blocks:
            if tile.keeps:
                left = tile.residual_room(finite)
                torch.addmm(tile.form(), sent_rows, Q_sent, alpha=-1, out=left)
                tile.keep(left, finite)
            tile.write(torch.mm(rows, Q, out=tile.room))

    def largest_mean(self, side: Side, mean: Tensor) -> Tensor:
        """Return the mean's largest magnitude, 0-dim; this overwrites what `form` returned, so form again."""
        P, Q = in_full(*((mean.t(), self.Q) if side == "P" else (self.P.t(), mean)))
        of_blocks = zip(P.split(self.block_rows), self.blocks, strict=True)
        return torch.stack([torch.mm(rows, Q, out=block.tile.room).abs().amax() for rows, block in of_blocks]).amax()


class LowRankPlan(NamedTuple):
    """A bucket's matrices, and what is sent uncompressed beside them."""

    matrices: Sequence[LowRankMatrix]
    rest: Sequence[Tile]
    parts_of_rest: Sequence[Part]
    """Sent together with factors, it is as wide as they are; sent alone, it keeps its own dtype."""

    @classmethod
    def of(cls, matrices: Sequence[LowRankMatrix], rest: Sequence[Tile]) -> LowRankPlan:
        """Create the parts of what is sent uncompressed."""
        wide = matrices[0].P.dtype if matrices else None
        return cls(matrices, rest, [Part(tile.gradient, tile.layout, wide) for tile in rest])

    @classmethod
    def of_slots(
        cls,
        bucket: BucketView,
        form_of: Callable[[Tensor, str], MatrixForm | None],
        rank: Callable[[MatrixForm], int],
    ) -> LowRankPlan:
        """Give each parameter for which there is a form its own matrix, with its rank; the rest stays uncompressed."""
        forms = [(slot, form_of(slot.parameter, slot.name)) for slot in bucket.slots]
        matrices = [LowRankMatrix(s.name, form, rank(form), s.tile, s, layout=None) for s, form in forms if form]
        return cls.of(matrices, [slot.tile for slot, form in forms if form is None])

    def finish(self, side: Side, means: Sequence[Tensor], turn: int, context: Context, finite: Tensor) -> None:
        """Write means and residuals, from the mean factors of the last side and this rank's own ones."""
        sent = [context.as_sent(x.factor(side)) for x in self.matrices]
        columns = batched(_columns, means if side == "P" else [x.P for x in self.matrices])
        columns_sent = batched(_columns, sent) if side == "P" else columns
        for number, x in there_and_back(list(enumerate(self.matrices)), turn):
            Q, Q_sent = (x.Q, x.Q) if side == "P" else (means[number], sent[number])
            x.finish(columns[number], Q, columns_sent[number], Q_sent, finite)

    def largest(self, side: Side, means: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the largest elements of the mean, in the bucket's own dtype, if that has a short range."""
        if not self.matrices or not self.matrices[0].blocks[0].tile.has_short_range:
            return []
        dtype = self.matrices[0].blocks[0].tile.gradient.dtype
        return [x.largest_mean(side, mean).to(dtype) for x, mean in zip(self.matrices, means, strict=True)]


def batched(function: Callable[..., Tensor], *matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the function of each matrix, or of each tuple of matrices; those of one shape are passed as one batch.

    Factors are small: a call takes longer than its arithmetic.
    """
    alike: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices[0]):
        alike.setdefault(matrix.shape, []).append(number)
    results = list(matrices[0])
    for numbers in alike.values():
        batch = [torch.stack([each[number] for number in numbers]) for each in matrices]
        for number, result in zip(numbers, function(*batch).unbind(), strict=True):
            results[number] = result
    return results


def there_and_back(items: Sequence[Item], turn: int) -> Sequence[Item]:
    """Return the items, reversed on every other turn, so that those used last, which are still cached, come first."""
    return items[::-1] if turn % 2 else items


def _columns(P: Tensor) -> Tensor:
    """Return matrices r×n as n×r, which products with few columns read faster."""
    return P.mT.contiguous()


def rows_of_a_block(m: int, r: int, threads: int) -> int:
    """Return how many rows of a matrix of width m to process at a time, so that they stay in the cores' caches.

    Several threads share a block's rows or columns as their BLAS decides, and each needs enough of them. On one thread,
    products with one row or column stream through memory; those with more process a block a few columns at a time: if
    the block has few rows, a multiple of what a BLAS takes at once, these are read like so many streams. (All rows of a
    768×3072 matrix at once took 1.8 times as long at rank 4.)
    """
    most = max(1, threads * BLOCK_ELEMENTS // m)
    if r == 1 or threads > 1:
        return most
    return min(most, max(TILE_ROWS, BLOCK_ELEMENTS // 4 // m // TILE_ROWS * TILE_ROWS))
