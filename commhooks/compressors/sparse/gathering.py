"""Elements and their indices, gathered from all ranks and added up."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from commhooks.compressors.sparse.indices import Coding, InBlocks, Indices, codings_of
from commhooks.devices import copied_to, runs_later
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Context
from commhooks.language.requests import AllGather, Asked, Judge, Layout, Part
from commhooks.language.tile import Tile
from commhooks.native.largest import Packed, Selection
from commhooks.tensors import computing_dtype

_ENTRIES_AT_ONCE = 4096
"""The number of entries of each rank to add at a time on a CPU, so that the memory is still cached for the next
rank."""


def are_formed_together(bucket: BucketView) -> bool:
    """Return whether the sums of gradients and residuals of all slots lie side by side, in the bucket's memory."""
    return bucket.is_whole and not bucket.scratch.is_needed


class Member(NamedTuple):
    """A parameter some of whose elements are sent."""

    slot: Slot
    tile: Tile
    """The tile of the parameter, or of one rank's shard of it."""
    coding: Coding
    number: int
    """Its index among the parameters of this coding."""
    place: slice
    """Its elements in the memory of its piece."""
    entries: slice
    """Its entries among the bucket's."""
    group: int
    """The index of its coding in the plan."""
    first: int
    """Its first entry among its coding's."""


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A tile, the parameters in it, and its entries among the bucket's."""

    tile: Tile
    members: Sequence[Member]
    entries: slice
    starts: Tensor
    """[k]: the offsets to add to the numbers of entries to get their indices into the tile."""

    @functools.cached_property
    def runs(self) -> Sequence[int]:
        """`runs_of` its entries."""
        return runs_of(itertools.chain.from_iterable(member.coding.shares(member.number) for member in self.members))


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The entries that a bucket sends, each a value and a number, sorted by coding and then by parameter."""

    pieces: Sequence[Piece]
    codings: Sequence[tuple[Coding, Layout]]
    """Each coding, with the parameters that own its entries."""
    layout: Layout
    """The parameters of all entries."""

    @classmethod
    def of(cls, bucket: BucketView, indices: Indices, ratio: float, *, by_slot: bool = False) -> Self:
        """Return a plan for the slots that have elements: with one piece if they share memory, unless `by_slot`."""
        is_one = not by_slot and are_formed_together(bucket)
        tiles = [(slot, slot.tile) for slot in bucket.filled]
        return cls._over(tiles, bucket.tiles[0] if is_one else None, bucket.memory, indices, ratio)

    @classmethod
    def of_shards(cls, bucket: BucketView, indices: Indices, ratio: float) -> list[Self]:
        """Return a plan for each rank's shards in a bucket of shards, with a piece for each that has elements."""
        of_ranks = zip(*(slot.shards for slot in bucket.slots), strict=True)
        return [
            cls._over(
                [(slot, tile) for slot, tile in zip(bucket.slots, shards, strict=True) if tile.gradient.numel()],
                None,
                bucket.memory,
                indices,
                ratio,
            )
            for shards in of_ranks
        ]

    @classmethod
    def _over(
        cls, tiles: Sequence[tuple[Slot, Tile]], whole: Tile | None, like: Tensor, indices: Indices, ratio: float
    ) -> Self:
        """Return a plan for tiles, all of which are parts of one if there is a `whole`."""
        sizes = [tile.gradient.numel() for _, tile in tiles]
        offsets = list(itertools.accumulate(sizes, initial=0)) if whole is not None else [0] * len(sizes)
        codings, starts, all_members, first = list[tuple[Coding, Layout]](), [], list[Member](), 0
        for coding, positions in codings_of(indices, sizes, ratio, computing_dtype(like.dtype).itemsize):
            members, before = [], first
            for number, at in enumerate(positions):
                end = first + coding.sent(sizes[at])
                place = slice(offsets[at], offsets[at] + sizes[at])
                slot, tile = tiles[at]
                entries, group = slice(first, end), len(codings)
                members.append(Member(slot, tile, coding, number, place, entries, group, first - before))
                first = end
            codings.append((coding, _layout(members)))
            starts.append(coding.starts([offsets[at] for at in positions]))
            all_members += members
        dtype = torch.int32 if sum(sizes) < 1 << 31 else torch.int64
        to_add = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *starts])).to(dtype)
        to_add = copied_to(like.device, to_add)
        pieces = [Piece(member.tile, [member], member.entries, to_add[member.entries]) for member in all_members]
        if whole is not None:
            pieces = [Piece(whole, all_members, slice(0, first), to_add)]
        return cls(pieces, codings, _layout(all_members))


def _layout(members: Sequence[Member]) -> Layout:
    """Return the layout of members' entries."""
    counts = [member.entries.stop - member.entries.start for member in members]
    return Layout(tuple(member.slot.name for member in members), tuple(counts))


class Sent(NamedTuple):
    """The elements that this rank sends of a piece."""

    piece: Piece
    numbers: Tensor
    """[k]"""
    places: Tensor
    """[k], indices into the tile."""
    values: Tensor
    """[k]"""

    @classmethod
    def largest_of(cls, piece: Piece, memory: Tensor) -> Sent:
        """Return the largest elements in `memory`, of the size of a piece."""
        found = [member.coding.choose(member.number, memory[member.place]) for member in piece.members]
        numbers = found[0] if len(found) == 1 else torch.cat(found)
        places = (numbers + piece.starts).long()
        return cls(piece, numbers, places, memory.index_select(0, places))


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


class Run(NamedTuple):
    """The elements that all ranks sent of one parameter, coded in blocks, which compiled code decodes and adds up."""

    selection: Selection
    member: Member
    coding: InBlocks
    codes: Tensor
    """[W, bytes], of all parameters of this coding."""
    values: Tensor
    """[W, k]"""

    def overwrite(self, memory: Tensor) -> None:
        """Overwrite the parameter's 1-D memory with the mean."""
        coding, elements, first = self.coding, len(memory), self.member.first
        block = coding.block(elements)
        whole = elements // block * block
        sent = elements // block * coding.share(block)
        codes = Packed(self.codes, coding.bits, coding.k, first)
        self.selection.sum(memory[:whole].view(-1, block), codes, self.values[:, :sent])
        if whole < elements:
            self.selection.sum(memory[whole:].unsqueeze(0), codes._replace(first=first + sent), self.values[:, sent:])


class Received(NamedTuple):
    """The elements that all ranks sent of one piece: entries, or runs of parameters, decoded while they are added."""

    entries: Sequence[tuple[Tensor, Tensor, Sequence[int]]]
    """Places [W, k], as indices into the tile, values [W, k], divided by W, and `runs_of` them."""
    runs: Sequence[Run]

    def overwrite(self, memory: Tensor) -> Tensor:
        """Overwrite 1-D memory of the tile's size with the mean, added up in rank order, and return it."""
        if self.entries:
            memory.zero_()
        for places, values, runs in self.entries:
            add_in_rank_order(memory, places, values, runs)
        for run in self.runs:
            run.overwrite(memory[run.member.place])
        return memory


def encoded(plan: Plan, sent: Sequence[Sent]) -> tuple[Tensor, list[Tensor]]:
    """Return the values [entries] of all pieces, and the codes of their numbers, one for each coding."""
    numbers = torch.cat([own.numbers for own in sent]).split([layout.elements for _, layout in plan.codings])
    codes = [coding.encode(own) for (coding, _), own in zip(plan.codings, numbers, strict=True)]
    return torch.cat([own.values for own in sent]), codes


def gather(plan: Plan, sent: Sequence[Sent], context: Context) -> Generator[Asked, Any, tuple[Tensor, list[Received]]]:
    """Send to all ranks; return the verdict, and the received elements of each piece."""
    values, codes = encoded(plan, sent)
    parts = [Part(code, layout) for code, (_, layout) in zip(codes, plan.codings, strict=True)]
    answers = yield AllGather(Part(values, plan.layout), *parts, last=True)
    received = received_of(plan, answers[0], answers[1:])
    sums = (of_all.overwrite(piece.tile.room) for piece, of_all in zip(plan.pieces, received, strict=True))
    return (yield Judge(answers[0], *plan.pieces[0].tile.in_own_range(sums))), received


def received_of(plan: Plan, values: Tensor, codes: Sequence[Tensor]) -> list[Received]:
    """Decode values [W, entries] and the codes [W, bytes] of each coding into the elements of each piece."""
    selection = Selection.chosen(values)
    decoded = {
        group: coding.decode(code)
        for group, ((coding, _), code) in enumerate(zip(plan.codings, codes, strict=True))
        if selection is None or not isinstance(coding, InBlocks)
    }
    if selection is None:
        means = values / len(values)
        numbers = decoded[0] if len(decoded) == 1 else torch.cat(list(decoded.values()), dim=1)
        return [
            Received([(numbers[:, piece.entries] + piece.starts, means[:, piece.entries], piece.runs)], [])
            for piece in plan.pieces
        ]
    received = []
    for piece in plan.pieces:
        entries, runs = [], []
        for member in piece.members:
            code, own = codes[member.group], values[:, member.entries]
            if isinstance(member.coding, InBlocks):
                runs.append(Run(selection, member, member.coding, code, own))
                continue
            numbers = decoded[member.group][:, member.first : member.first + own.shape[1]]
            first = member.entries.start - piece.entries.start
            places = numbers + piece.starts[first : first + own.shape[1]]
            entries.append((places, own / len(own), runs_of(member.coding.shares(member.number))))
        received.append(Received(entries, runs))
    return received
