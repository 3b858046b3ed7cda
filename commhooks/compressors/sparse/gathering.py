"""Elements and their indices: sent to all ranks, or each rank the elements of its own shards, and added up.

Legend: W ranks; K entries and C bytes of codes in a row of a message of shards, the most that any rank has.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from commhooks.compressors.kernels.sums import PackedNumbers, SparseEntries, UnpackedNumbers, runs_of, write_mean
from commhooks.compressors.sparse.indices import Coding, Indices, codings_of
from commhooks.devices import copied_to
from commhooks.language import BucketView, Context, Slot, Tile
from commhooks.language.requests import AllGather, AllToAll, Asked, Flags, Judge, Layout, Part
from commhooks.native.largest import SparseKernels
from commhooks.tensors import bytes_of, computing_dtype


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
    memory: slice
    """Its elements in the memory of its piece."""
    entries: slice
    """Its entries among those of the coding."""


class Segment(NamedTuple):
    """Some parameters of a piece that have the same coding, and their entries, which follow each other."""

    members: Sequence[Member]
    coding: int
    """The index of their coding in the plan."""
    entries: slice
    """Their entries among the bucket's."""
    places: SparseEntries
    """The same among the coding's, and their places in the piece's memory."""

    @classmethod
    def of(cls, members: Sequence[Member], coding: int, first: int, starts: Tensor) -> Self:
        """Return a segment, given the first entry of the coding in the bucket, and the starts of all its entries."""
        own = slice(members[0].entries.start, members[-1].entries.stop)
        shares = [share for one in members for share in one.coding.shares(one.number)]
        blocks = [
            some for one in members for some in one.coding.blocks(one.number, one.memory.start, one.entries.start)
        ]
        places = SparseEntries(own, starts[own], runs_of(shares), blocks)
        return cls(members, coding, slice(first + own.start, first + own.stop), places)


class SparsePiece(NamedTuple):
    """A tile, and the parameters in it."""

    tile: Tile
    segments: Sequence[Segment]

    @property
    def slot(self) -> Slot:
        """Its first parameter's."""
        return self.segments[0].members[0].slot


@dataclasses.dataclass(frozen=True, eq=False)
class SparsePlan:
    """The entries that a bucket sends, each a value and a number, sorted by coding and then by parameter."""

    pieces: Sequence[SparsePiece]
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
        plans = []
        for shards in zip(*(slot.shards for slot in bucket.slots), strict=True):
            pairs = zip(bucket.slots, shards, strict=True)
            tiles = [(slot, tile) for slot, tile in pairs if tile.gradient.numel()]
            plans.append(cls._over(tiles, None, bucket.memory, indices, ratio))
        return plans

    @classmethod
    def _over(
        cls, tiles: Sequence[tuple[Slot, Tile]], whole: Tile | None, like: Tensor, indices: Indices, ratio: float
    ) -> Self:
        """Return a plan for tiles, all of which are parts of one if there is a `whole`."""
        sizes = [tile.gradient.numel() for _, tile in tiles]
        offsets = list(itertools.accumulate(sizes, initial=0)) if whole is not None else [0] * len(sizes)
        dtype = torch.int32 if sum(sizes) < 1 << 31 else torch.int64
        codings, segments, first = list[tuple[Coding, Layout]](), list[Segment](), 0
        for coding, positions in codings_of(indices, sizes, ratio, computing_dtype(like.dtype).itemsize):
            starts = torch.from_numpy(coding.starts([offsets[at] for at in positions])).to(dtype)
            starts = copied_to(like.device, starts)
            members, begin = list[Member](), 0
            for number, at in enumerate(positions):
                entries = slice(begin, begin + coding.sent(sizes[at]))
                memory = slice(offsets[at], offsets[at] + sizes[at])
                members.append(Member(*tiles[at], coding, number, memory, entries))
                begin = entries.stop
            together = [members] if whole is not None else [[member] for member in members]
            segments += [Segment.of(some, len(codings), first, starts) for some in together]
            counts = [member.entries.stop - member.entries.start for member in members]
            codings.append((coding, Layout(tuple(member.slot.name for member in members), tuple(counts))))
            first += begin
        pieces = [SparsePiece(one.members[0].tile, [one]) for one in segments]
        if whole is not None:
            pieces = [SparsePiece(whole, segments)]
        return cls(pieces, codings, _together(layout for _, layout in codings))


class Sent(NamedTuple):
    """The elements that this rank sends of a piece."""

    piece: SparsePiece
    numbers: Tensor
    """[k]"""
    places: Tensor
    """[k], indices into the tile; none if `is_taken`."""
    values: Tensor
    """[k]"""
    is_taken: bool = False
    """True if the unsent part is in the residual already."""

    @classmethod
    def taken_of(cls, piece: SparsePiece, least: float | Tensor) -> Sent | None:
        """Return the largest elements of gradient + residual, as zeros if below `least`, and keep all others.

        None if that cannot be done in one pass before the verdict; see `Tile.took`.
        """
        members = [one for own in piece.segments for one in own.members]
        native = SparseKernels.chosen(piece.tile.gradient)
        if native is None or isinstance(least, Tensor) or not piece.tile.keeps:
            return None
        residuals = [one.tile.residuals_to_take() for one in members]
        for one, own in zip(members, residuals, strict=True):
            if len(own) != one.tile.keeps or not one.coding.can_take(one.number):
                return None
        numbers, values = [], []
        for one, own in zip(members, residuals, strict=True):
            found = one.coding.take(native, one.number, one.tile.gradient, own[0] if own else None, least)
            if own:
                one.tile.took()
            numbers.append(found[0])
            values.append(found[1])
        return cls(piece, torch.cat(numbers), numbers[0][:0], torch.cat(values), is_taken=True)

    @classmethod
    def largest_of(cls, piece: SparsePiece, memory: Tensor) -> Sent:
        """Return the largest elements in `memory`, of the size of a piece."""
        found = [one.coding.choose(one.number, memory[one.memory]) for own in piece.segments for one in own.members]
        numbers = found[0] if len(found) == 1 else torch.cat(found)
        starts = [own.places.starts for own in piece.segments]
        places = (numbers + (starts[0] if len(starts) == 1 else torch.cat(starts))).long()
        return cls(piece, numbers, places, memory.index_select(0, places))


class Received(NamedTuple):
    """The elements that all ranks sent of one piece."""

    piece: SparsePiece
    values: Tensor
    """[W, entries], of all pieces."""
    numbers: Sequence[PackedNumbers | UnpackedNumbers]
    """The numbers of each coding."""

    def overwrite(self, memory: Tensor) -> Tensor:
        """Overwrite 1-D memory of the tile's size with the mean, added up in rank order, and return it."""
        return write_mean(
            memory, [(own.places, self.values[:, own.entries], self.numbers[own.coding]) for own in self.piece.segments]
        )


def encoded(plan: SparsePlan, sent: Sequence[Sent]) -> tuple[Tensor, list[Tensor]]:
    """Return the values [entries] of all pieces, and the codes of their numbers, one for each coding."""
    numbers = torch.cat([own.numbers for own in sent]).split([layout.elements for _, layout in plan.codings])
    codes = [coding.encode(own) for (coding, _), own in zip(plan.codings, numbers, strict=True)]
    return torch.cat([own.values for own in sent]), codes


def received_of(plan: SparsePlan, values: Tensor, codes: Sequence[Tensor]) -> list[Received]:
    """Return the elements of each piece, from values [W, entries] and the codes [W, bytes] of each coding."""
    numbers = [coding.received(code) for (coding, _), code in zip(plan.codings, codes, strict=True)]
    return [Received(piece, values, numbers) for piece in plan.pieces]


def gather(
    plan: SparsePlan, sent: Sequence[Sent], context: Context
) -> Generator[Asked, Any, tuple[Tensor, list[Received]]]:
    """Send to all ranks; return the verdict, and the received elements of each piece."""
    values, codes = encoded(plan, sent)
    parts = [Part(code, layout) for code, (_, layout) in zip(codes, plan.codings, strict=True)]
    answers = yield AllGather(Part(values, plan.layout), *parts, last=True)
    received = received_of(plan, answers[0], answers[1:])
    sums = (of_all.overwrite(of_all.piece.tile.room) for of_all in received)
    return (yield Judge(answers[0], *plan.pieces[0].tile.in_own_range(sums))), received


def scatter(
    bucket: BucketView, plans: Sequence[SparsePlan], sent: Sequence[Sequence[Sent]], context: Context
) -> Generator[Asked, Any, tuple[Tensor | None, list[Received]]]:
    """Send each rank the elements of its shards; return the verdict, and the received elements of each piece.

    The verdict is None if no unsent part is kept.
    """
    ranks, dtype = len(plans), computing_dtype(bucket.memory.dtype)
    values = bucket.memory.new_zeros(ranks, max(plan.layout.elements for plan in plans), dtype=dtype)  # [W, K]
    codes = bucket.memory.new_zeros(ranks, max(map(_code_bytes, plans)), dtype=torch.uint8)  # [W, C]
    seen = [values]
    for plan, own, of_row, code in zip(plans, sent, values, codes, strict=True):
        if own:
            chosen, of_codings = encoded(plan, own)
            of_row[: len(chosen)] = chosen
            code[: _code_bytes(plan)] = torch.cat([bytes_of(one) for one in of_codings])
            seen += own[0].piece.tile.in_own_range([chosen])
    layout = _together(plan.layout for plan in plans)
    flags = [Flags.of(seen, ranks)] if bucket.keeps else []
    *answers, of_values, of_codes = yield AllToAll(*flags, Part(values, layout), Part(codes, layout), last=True)
    finite = (yield Judge(*answers)) if bucket.keeps else None
    plan = plans[context.rank]
    if not plan.pieces:
        return finite, []
    sizes = [coding.code_bytes for coding, _ in plan.codings]
    apart = of_codes[:, : sum(sizes)].split(sizes, 1)
    typed = [code.contiguous().view(coding.dtype) for (coding, _), code in zip(plan.codings, apart, strict=True)]
    return finite, received_of(plan, of_values[:, : plan.layout.elements].contiguous(), typed)


def _code_bytes(plan: SparsePlan) -> int:
    return sum(coding.code_bytes for coding, _ in plan.codings)


def _together(layouts: Iterable[Layout]) -> Layout:
    """Return the layout of the entries of several layouts."""
    counts: dict[str, int] = {}
    for layout in layouts:
        for name, count in zip(layout.keys, layout.sizes, strict=True):
            counts[name] = counts.get(name, 0) + count
    return Layout(tuple(counts), tuple(counts.values()))
