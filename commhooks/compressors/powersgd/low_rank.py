"""What a low-rank compressor lays out for one bucket: its matrices, their two factors, and the messages they lie in.

Legend: M n×m a gradient plus its residual; P r×n the left factor and Q r×m the right one, both kept transposed, for
products over rows of M are the fast ones; r the rank. Factors have memory of their own and are copied into messages. A
product's last bits depend on where its operands lie, in a way of each processor's own: equal bits are promised for
buckets that are laid out alike, and nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from commhooks.compressors.powersgd.matrices import MatrixForm
from commhooks.compressors.powersgd.precision import in_full
from commhooks.language.compressor import BucketView, Slot, add_owed, residual_of
from commhooks.language.requests import AllReduce, Layout
from commhooks.state.table import RESIDUAL, ParameterState
from commhooks.streams import keep_until_read, wait_for_copies
from commhooks.tensors import computing_dtype

Side = Literal["P", "Q"]
OTHER: dict[Side, Side] = {"P": "Q", "Q": "P"}

BLOCK_ELEMENTS = 1 << 18
"""Large matrices are worked on in blocks of rows of at most so many elements a thread, unless a row has more."""
TILE_ROWS = 16
"""The rows that a BLAS multiplies at once, or a multiple of them."""


class Message:
    """Hold one side's factors one after the other and, behind them, room for what is not compressed."""

    def __init__(
        self,
        side: Side,
        matrices: Sequence[LowRankMatrix],
        rest: Sequence[tuple[str, Tensor]],
        like: Tensor,
        *,
        by_parameter: bool,
    ) -> None:
        self._factors = [x.factor(side) for x in matrices]
        self._rest = [memory for _, memory in rest]
        keys, sizes = tuple(x.key for x in matrices), tuple(factor.numel() for factor in self._factors)
        rest_keys, rest_sizes = tuple(key for key, _ in rest), tuple(memory.numel() for memory in self._rest)
        self._layout = Layout(keys, sizes) if by_parameter else None
        self._layout_with_rest = Layout(keys + rest_keys, sizes + rest_sizes) if by_parameter else None
        self.with_rest = like.new_empty(sum(sizes) + sum(rest_sizes))
        self.factors = self.with_rest[: sum(sizes)]
        self.parts = [
            part.view(factor.shape) for part, factor in zip(self.factors.split(sizes), self._factors, strict=True)
        ]
        """What each matrix's factor is in the message: after the request, the mean over the ranks."""
        self._rest_parts = list(self.with_rest[sum(sizes) :].split(rest_sizes)) if rest else []

    def pack(self, *, with_rest: bool, last: bool) -> AllReduce:
        """Copy the factors in, and what is not compressed; return the request for their mean."""
        torch._foreach_copy_(self.parts, self._factors)
        if not with_rest:
            return AllReduce(self.factors, average=True, last=last, layout=self._layout)
        if self._rest:
            torch._foreach_copy_(self._rest_parts, self._rest)
        return AllReduce(self.with_rest, average=True, last=last, layout=self._layout_with_rest)

    def unpack(self) -> None:
        """Copy the factors that came back to where they are worked with."""
        torch._foreach_copy_(self._factors, self.parts)

    def rest_fits(self, limit: float) -> Tensor:
        """Return a 0-dim bool: no element of the mean of what is not compressed is beyond `limit`."""
        rest = self.with_rest[self.factors.numel() :]
        return (rest.abs() <= limit).all()

    def unpack_rest(self) -> None:
        """Copy the mean of what is not compressed back into the bucket."""
        if self._rest:
            torch._foreach_copy_(self._rest, self._rest_parts)


class Block(NamedTuple):
    """Some rows of a matrix, as views that are made once."""

    gradient: Tensor
    """rows×m, in the bucket."""
    residual: Tensor | None
    """rows×m: what this rank has not got through yet."""
    P: Tensor
    """r×rows, columns of the matrix's own P."""


class LowRankMatrix:
    """The views of one matrix: gradient and residual, in blocks of rows, its factors, and where its state lives."""

    scratch: Tensor | None = None
    """A block of M, where the bucket's dtype is too narrow for it to be formed there."""

    def __init__(
        self, key: str, form: MatrixForm, rank: int, memory: Tensor, residual: Tensor | None, home: ParameterState
    ) -> None:
        self.key = key
        self.n, self.m = form.n, form.m
        self.r = min(self.n, self.m, rank)
        self.P = memory.new_zeros(self.r, self.n, dtype=computing_dtype(memory.dtype))
        self.Q = memory.new_zeros(self.r, self.m, dtype=computing_dtype(memory.dtype))
        self.home = home
        threads = 1 if memory.is_cuda else torch.get_num_threads()
        self.block_rows = min(self.n, rows_of_a_block(self.m, 1 if memory.is_cuda else self.r, threads))
        gradients = form.view(memory).split(self.block_rows)
        residuals = [None] * len(gradients) if residual is None else form.view(residual).split(self.block_rows)
        self.blocks = list(map(Block, gradients, residuals, self.P.split(self.block_rows, dim=1)))

    def factor(self, side: Side) -> Tensor:
        """Return P or Q."""
        return self.P if side == "P" else self.Q

    def multiply(self, side: Side, *, again: bool) -> None:
        """Write this rank's own factor of one side, M times the other side's; `again` if M was formed in this step."""
        if side == "P":
            for block in self.blocks:
                torch.mm(self.Q, self.form(block, again=again).t(), out=block.P)  # r×m · m×rows
        else:
            self.Q.zero_()
            for block in self.blocks:
                self.Q.addmm_(block.P, self.form(block, again=again))  # r×rows · rows×m

    def room(self, block: Block) -> Tensor:
        """Return where a block of M is formed: in the bucket's memory, if that is wide enough."""
        return block.gradient if self.scratch is None else self.scratch[: len(block.gradient)]

    def form(self, block: Block, *, again: bool) -> Tensor:
        """Return a block of M. In the bucket it stays formed; scratch memory has served other blocks since."""
        M = self.room(block)
        if self.scratch is not None:
            M.copy_(block.gradient)
        elif again:
            return M
        if block.residual is not None:
            add_owed([M], [block.residual])
        return M

    def write_mean(self, block: Block, mean: Tensor) -> None:
        """Write a block of the mean where the gradient was, unless it is there already."""
        if self.scratch is not None:
            block.gradient.copy_(mean)


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


class LowRankPlan:
    """Lay out one bucket: its matrices, and what travels uncompressed beside them."""

    def __init__(
        self,
        bucket: BucketView,
        matrices: Sequence[LowRankMatrix],
        rest: Sequence[tuple[str, Tensor]],
        rides_with: Sequence[Side],
        *,
        by_parameter: bool = True,
    ) -> None:
        self.matrices = matrices
        wide = bucket.memory.new_empty(0, dtype=computing_dtype(bucket.memory.dtype))
        self.messages = {
            side: Message(side, matrices, rest if side in rides_with else (), wide, by_parameter=by_parameter)
            for side in OTHER
        }
        self._limit = torch.finfo(bucket.memory.dtype).max
        self._narrow_range = self._limit < torch.finfo(wide.dtype).max / 2  # fp16; bf16 reaches as far as fp32
        self._true = torch.ones((), dtype=torch.bool, device=bucket.memory.device)
        if bucket.memory.dtype != wide.dtype:
            scratch = wide.new_empty(max((x.block_rows * x.m for x in matrices), default=0))
            for x in matrices:
                x.scratch = scratch[: x.block_rows * x.m].view(x.block_rows, x.m)

    def fits(self, first: Side, last: Side) -> Tensor:
        """Return a 0-dim bool: the mean is finite in the bucket's own dtype too, which may have too short a range."""
        if not self._narrow_range:
            return self._true
        largest = []
        for x, mean in zip(self.matrices, self.messages[last].parts, strict=True):
            P, Q = in_full(*((mean.t(), x.Q) if last == "P" else (x.P.t(), mean)))
            of_blocks = zip(P.split(x.block_rows), x.blocks, strict=True)
            largest += [torch.mm(rows, Q, out=x.room(block)).abs().amax() for rows, block in of_blocks]
        return (torch.stack(largest) <= self._limit).all() & self.messages[first].rest_fits(self._limit)


def joint_residual(slots: Sequence[Slot]) -> Tensor:
    """Return the residuals of several parameters as one stretch of memory, which theirs are views of from now on."""
    apart = [residual_of(slot) for slot in slots]
    wait_for_copies(apart)
    elements = sum(residual.numel() for residual in apart)
    joint = torch.empty(elements, dtype=apart[0].dtype, device=apart[0].device, pin_memory=apart[0].is_pinned())
    torch.cat(apart, out=joint)
    keep_until_read(apart)
    for slot, part in zip(slots, joint.split([slot.gradient.numel() for slot in slots]), strict=True):
        slot.state.local[RESIDUAL] = part
    return joint
