"""The dealing of a bucket's blocks to the ranks for two hops, and their places in its memory and in messages.

Legend: B blocks of n elements; W ranks; b rows for each rank in a message, the most blocks that any rank serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from commhooks.compressors.codecs.passes import Places
from commhooks.compressors.powersgd.matrices import MatrixForm
from commhooks.devices import copied_to
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Context
from commhooks.language.entries import first_server
from commhooks.language.memory import elements_at_once
from commhooks.language.noise import Keys
from commhooks.language.requests import Layout
from commhooks.language.tile import Tile


class Share(NamedTuple):
    """The blocks of a parameter that this rank serves, and their rows among all that it serves."""

    slot: Slot
    rows: slice


class Piece(NamedTuple):
    """Some of a bucket's blocks, one after another in its memory, and the places of their codes in messages."""

    tile: Tile
    places: Places


class Deal:
    """The assignment of a bucket's blocks to ranks: the next block is always served by the next rank."""

    def __init__(
        self, bucket: BucketView, block: int, at_once: int, pays: Callable[[int], bool], context: Context
    ) -> None:
        ranks, device = context.world_size, bucket.memory.device
        self.ranks = ranks
        """W."""
        self.coded = [slot for slot in bucket.slots if pays(slot.gradient.numel())]
        blocks = [slot.gradient.numel() // block for slot in self.coded]
        self.rest = [(slot, slot.tile) for slot in bucket.slots if not pays(slot.gradient.numel())]
        """Slots with elements that are averaged uncompressed, and the tiles of these."""
        tiles, total = list[Tile](), 0
        for run in _runs(self.coded, block):
            tile = bucket.run(run)
            whole = tile.gradient.numel() // block
            tiles += tile.rows(MatrixForm(whole, block), at_once)
            total += whole
            self.rest += [(run[-1], rest) for rest in tile.rest(whole * block)]
        self.shares = []
        held = numpy.zeros(ranks, dtype=numpy.int64)  # blocks that each rank serves so far
        found = [numpy.zeros(0, dtype=numpy.int64)]
        for slot, count in zip(self.coded, blocks, strict=True):
            numbers = numpy.arange(count)
            servers = (numbers + first_server(slot.name, ranks)) % ranks
            found.append(numpy.stack([servers, held[servers] + numbers // ranks], axis=1).reshape(-1))
            begin = int(held[context.rank])
            held += numpy.bincount(servers, minlength=ranks)
            if held[context.rank] > begin:
                self.shares.append(Share(slot, slice(begin, int(held[context.rank]))))
        self.longest = int(held.max())
        """b."""
        servers, places = numpy.concatenate(found).reshape(-1, 2).T
        flat = servers * self.longest + places
        self.sizes = [len(tile.gradient) for tile in tiles]
        """The numbers of blocks to send and write at a time, in the bucket's order."""
        on_device = (
            copied_to(device, torch.from_numpy(one.copy())).split(self.sizes) for one in (servers, places, flat)
        )
        self.pieces = [Piece(tile, Places(*own)) for tile, *own in zip(tiles, *on_device, strict=True)]
        of_rows = numpy.full(ranks * self.longest, total)
        of_rows[flat] = numpy.arange(total)
        unused = numpy.flatnonzero(of_rows == total)
        rows = (unused // self.longest, unused % self.longest, unused)
        self.padding = Places(*(copied_to(device, torch.from_numpy(one)) for one in rows))
        """The places of rows without a block."""
        named = [
            Keys.of("", 0, block),
            *(Keys.of(slot.name, n, block) for slot, n in zip(self.coded, blocks, strict=True)),
        ]
        keys = Keys.together(named)
        self.keys = keys.on(device)
        served = of_rows[context.rank * self.longest :][: held[context.rank]]
        self.own_keys = keys.at(torch.from_numpy(served)).on(device)
        self.served = len(served)
        """The number of blocks that this rank serves."""
        self.own_sizes = [min(at_once, self.served - first) for first in range(0, self.served, at_once)]
        """The numbers of them to serve at a time."""
        self.layout = Layout(tuple(slot.name for slot in self.coded), tuple(blocks))


def _runs(slots: Sequence[Slot], block: int) -> Iterator[list[Slot]]:
    """Yield slots that are next to each other in memory; only the last of them may have elements beyond its blocks."""
    run: list[Slot] = []
    for slot in slots:
        if run:
            before = run[-1].gradient
            is_next = before.storage_offset() + before.numel() == slot.gradient.storage_offset()
            if before.numel() % block or not is_next:
                yield run
                run = []
        run.append(slot)
    if run:
        yield run


class Column(NamedTuple):
    """The first places, in each row of a message of shards, of a slot's blocks and of the ends of its shards."""

    block: int
    end: int


class Columns(NamedTuple):
    """The division of rows of a message of shards among slots: room for the most that any rank has of each."""

    columns: Sequence[Column]
    blocks: int
    ends: int
    block: int
    at_once: int
    keys: Sequence[Keys]
    """The keys of every slot's shards, in the order of `tiles`."""

    @classmethod
    def of(cls, bucket: BucketView, block: int) -> Columns:
        """Divide a bucket of shards."""
        columns, blocks, ends, keys = [], 0, 0, []
        for slot in bucket.slots:
            columns.append(Column(blocks, ends))
            lengths = [tile.gradient.numel() for tile in slot.shards]
            keys += [Keys.of(f"{slot.name}/{rank}", n // block, block) for rank, n in enumerate(lengths)]
            blocks += max(length // block for length in lengths)
            ends += max(length % block for length in lengths)
        device = bucket.memory.device
        keys = [own.on(device) for own in keys]
        return cls(columns, blocks, ends, block, max(1, elements_at_once(device) // block), keys)

    def tiles(self, bucket: BucketView) -> Iterator[tuple[Tile, int, Column, Keys]]:
        """Yield every slot's shards: the tile, its rank, the slot's columns, and its blocks' keys."""
        keys = iter(self.keys)
        for slot, column in zip(bucket.slots, self.columns, strict=True):
            for rank, tile in enumerate(slot.shards):
                yield tile, rank, column, next(keys)

    def places(self, rank: int, first: int, blocks: int) -> Places:
        """Return the places of consecutive rows of one rank."""
        rows = torch.arange(first, first + blocks, dtype=torch.int64, device=self.keys[0].rows.device)
        return Places(torch.full_like(rows, rank), rows, rows + rank * self.blocks)

    def pieces(self, memory: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield some blocks of 1-D memory at a time, [blocks, n], each time after the number of the first."""
        blocks = memory.view(-1, self.block)
        for start in range(0, len(blocks), self.at_once):
            yield start, blocks[start : start + self.at_once]
