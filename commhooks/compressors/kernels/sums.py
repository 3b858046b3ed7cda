"""Sums, in rank order, of the elements that all ranks have sent of a range of memory.

Legend: W ranks; k entries of each; T tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.compressors.tiles import MeanOver, TiledPiece, senders, without_padding
from commhooks.devices import runs_later
from commhooks.native.largest import MOST, Packed, SparseKernels
from commhooks.packing import unpack_integers

_ENTRIES_AT_ONCE = 4096
"""The number of entries of each rank to add at a time on a CPU, so that the memory is still cached for the next
rank."""


class PackedNumbers:
    """Numbers that all ranks have packed, `total` each, unpacked when they are first read."""

    def __init__(self, codes: Tensor, bits: int, total: int) -> None:
        self._packed = Packed(codes, bits, total, 0)

    @functools.cached_property
    def numbers(self) -> Tensor:
        """The numbers [W, total], int32."""
        return unpack_integers(self._packed.codes, self._packed.bits, (self._packed.total,))

    def since(self, first: int) -> Packed:
        """Return them for compiled code, which reads some from the first one on."""
        return self._packed._replace(first=first)


class UnpackedNumbers(NamedTuple):
    """Numbers in a code that only eager code can read."""

    numbers: Tensor
    """[W, total]."""


class EqualBlocks(NamedTuple):
    """Blocks of equal sizes, side by side in memory, of each of which equally many elements are sent."""

    memory: slice
    block: int
    entries: slice
    """Their entries among the numbers of one code."""


class SparseEntries(NamedTuple):
    """The places of entries in a range of memory, which consecutive numbers of one code tell."""

    numbers: slice
    """The numbers in the code."""
    starts: Tensor
    """[k]: the offsets that turn numbers into indices into the memory."""
    runs: Sequence[int]
    """`runs_of` the entries."""
    blocks: Sequence[EqualBlocks]
    """All entries block by block, if they are packed."""


def write_mean(memory: Tensor, sent: Sequence[tuple[SparseEntries, Tensor, PackedNumbers | UnpackedNumbers]]) -> Tensor:
    """Overwrite 1-D memory with the mean over ranks, zero where nothing is sent, and return it.

    Each of `sent` is some entries, their values [W, k], and the numbers of their code.
    """
    native = SparseKernels.chosen(memory)
    if native is None or not all(isinstance(numbers, PackedNumbers) for _, _, numbers in sent):
        memory.zero_()
    for entries, values, numbers in sent:
        if native is not None and isinstance(numbers, PackedNumbers):
            first = entries.numbers.start
            for blocks in entries.blocks:
                own = values[:, blocks.entries.start - first : blocks.entries.stop - first]
                at = numbers.since(blocks.entries.start)
                native.sum(memory[blocks.memory].view(-1, blocks.block), at, own)
        else:
            places = numbers.numbers[:, entries.numbers] + entries.starts
            add_in_rank_order(memory, places, values / len(values), entries.runs)
    return memory


def write_sum_of_tiles(
    memory: Tensor,
    piece: TiledPiece,
    means: Tensor,
    places: PackedNumbers,
    bins: PackedNumbers,
    over: MeanOver = "ranks",
) -> Tensor:
    """Overwrite 1-D memory with the sum over ranks of bins' means [W, S, 4] at the places of a piece's entries.

    With "senders", an element's sum is divided by the number of ranks that have sent it. Returns the memory.
    """
    is_simple = over == "ranks" and all(one.tiling.a * one.tiling.b <= MOST for one in piece.parameters)
    native = SparseKernels.chosen(memory) if is_simple else None
    if native is not None:
        for one in piece.parameters:
            at = places.since(one.entries.start), bins.since(one.entries.start)
            native.sum_of_tiles(one.tiling.sending(one.k), memory[one.memory], *at, means[:, one.number])
        return memory
    indices = torch.cat([one.indices(places.numbers[:, one.entries]) for one in piece.parameters], dim=1)
    of_bins = [means[:, one.number].gather(1, bins.numbers[:, one.entries].long()) for one in piece.parameters]
    values = torch.cat(of_bins, dim=1)
    if piece.is_padded:
        values, indices = without_padding(values, indices)
    if over == "senders":
        values = values / senders(values, indices, len(memory))
    return add_in_rank_order(memory.zero_(), indices, values, piece.runs)


def runs_of(shares: Iterable[int]) -> list[int]:
    """Return the numbers of entries in runs of blocks, given each block's number."""
    runs = [0]
    for share in shares:
        if runs[-1] >= _ENTRIES_AT_ONCE:
            runs.append(0)
        runs[-1] += share
    return runs


def add_in_rank_order(memory: Tensor, places: Tensor, values: Tensor, runs: Sequence[int]) -> Tensor:
    """Add the values [W, k] of each rank in turn at its places [W, k] in 1-D memory, and return the memory.

    `runs` are the numbers of entries to add at a time. They must cover the same elements on every rank, such as whole
    blocks: an element in two runs would not be added up in rank order.
    """
    at_once = [places.shape[1]] if runs_later(memory) else list(runs)
    for some, of_some in zip(places.split(at_once, 1), values.split(at_once, 1), strict=True):
        for of_rank, own in zip(some, of_some, strict=True):
            memory.index_add_(0, of_rank, own)
    return memory
