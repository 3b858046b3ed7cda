"""Elements and their indices, gathered from all ranks and added up."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from commhooks.compressors.sparse.indices import Coding, Indices, codings_of
from commhooks.devices import copied_to, runs_later
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Context
from commhooks.language.requests import AllGather, Asked, Judge, Layout, Part
from commhooks.language.tile import Tile
from commhooks.tensors import computing_dtype

_ENTRIES_AT_ONCE = 4096
"""How many entries of each rank are added at a time on a CPU, so that the memory is still in its cache for the next."""


def are_formed_together(bucket: BucketView) -> bool:
    """Return whether the sums of gradients and residuals of all slots stand side by side, in the bucket's memory."""
    return bucket.is_whole and not bucket.scratch.is_needed


class Member(NamedTuple):
    """A parameter of which elements are sent."""

    slot: Slot
    coding: Coding
    number: int
    """Its index among the parameters of this coding."""
    place: slice
    """Its elements in the memory of its piece."""
    entries: slice
    """Its entries among those of the bucket."""


class Piece(NamedTuple):
    """A tile, the parameters in it, and which entries of the bucket are sent of it."""

    tile: Tile
    members: Sequence[Member]
    entries: slice
    starts: Tensor
    """[k]: what to add to the number of an entry to get its index into the tile."""


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a bucket sends: entries, each a value and a number, sorted by coding and, within these, by parameter."""

    pieces: Sequence[Piece]
    codings: Sequence[tuple[Coding, Layout]]
    """Each with the parameters whose entries these are."""
    layout: Layout
    """The parameters of all entries."""

    @classmethod
    def of(cls, bucket: BucketView, indices: Indices, ratio: float, *, by_slot: bool = False) -> Plan:
        """Return a plan for the slots that have elements: with one piece if they share memory, unless `by_slot`."""
        slots = bucket.filled
        sizes = [slot.gradient.numel() for slot in slots]
        is_one = not by_slot and are_formed_together(bucket)
        offsets = list(itertools.accumulate(sizes, initial=0)) if is_one else [0] * len(sizes)
        codings, starts, all_members, first = [], [], list[Member](), 0
        for coding, positions in codings_of(indices, sizes, ratio, computing_dtype(bucket.memory.dtype).itemsize):
            members = []
            for number, at in enumerate(positions):
                end = first + coding.sent(sizes[at])
                place = slice(offsets[at], offsets[at] + sizes[at])
                members.append(Member(slots[at], coding, number, place, slice(first, end)))
                first = end
            codings.append((coding, _layout(members)))
            starts.append(coding.starts([offsets[at] for at in positions]))
            all_members += members
        dtype = torch.int32 if sum(sizes) < 1 << 31 else torch.int64
        to_add = copied_to(bucket.memory.device, torch.from_numpy(np.concatenate(starts)).to(dtype))
        pieces = [Piece(member.slot.tile, [member], member.entries, to_add[member.entries]) for member in all_members]
        if is_one:
            pieces = [Piece(bucket.tiles[0], all_members, slice(0, first), to_add)]
        return cls(pieces, codings, _layout(all_members))


def _layout(members: Sequence[Member]) -> Layout:
    """Return whose entries those of members are."""
    counts = [member.entries.stop - member.entries.start for member in members]
    return Layout(tuple(member.slot.name for member in members), tuple(counts))


class Sent(NamedTuple):
    """What this rank sends of one piece."""

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
        places = numbers + piece.starts
        return cls(piece, numbers, places, memory.index_select(0, places))


class Received(NamedTuple):
    """What all ranks have sent of one piece."""

    places: Tensor
    """[W, k], indices into the tile."""
    values: Tensor
    """[W, k], divided by W."""

    def add_to(self, memory: Tensor) -> Tensor:
        """Add them to 1-D memory, in rank order, and return the memory."""
        at_once = self.places.shape[1] if runs_later(memory) else _ENTRIES_AT_ONCE
        for places, values in zip(self.places.split(at_once, 1), self.values.split(at_once, 1), strict=True):
            for of_rank, own in zip(places, values, strict=True):
                memory.index_add_(0, of_rank, own)
        return memory


def gather(plan: Plan, sent: Sequence[Sent], context: Context) -> Generator[Asked, Any, tuple[Tensor, list[Received]]]:
    """Send to all ranks; return the verdict, and what was received of each piece."""
    values = torch.cat([own.values for own in sent])
    numbers = torch.cat([own.numbers for own in sent]).split([layout.elements for _, layout in plan.codings])
    codes = [Part(coding.encode(own), layout) for (coding, layout), own in zip(plan.codings, numbers, strict=True)]
    answers = yield AllGather(Part(values, plan.layout), *codes, last=True)
    means = answers[0] / context.world_size
    decoded = [coding.decode(code) for (coding, _), code in zip(plan.codings, answers[1:], strict=True)]
    numbers = decoded[0] if len(decoded) == 1 else torch.cat(decoded, dim=1)
    received = [Received(numbers[:, piece.entries] + piece.starts, means[:, piece.entries]) for piece in plan.pieces]
    sums = (of_all.add_to(piece.tile.room.zero_()) for piece, of_all in zip(plan.pieces, received, strict=True))
    return (yield Judge(answers[0], *plan.pieces[0].tile.in_own_range(sums))), received
