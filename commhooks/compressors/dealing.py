"""The dealing of a bucket's blocks to the ranks for two hops, and their places in its memory and in messages.

Legend: B blocks of n elements; W ranks; b rows for each rank in a message, the most blocks that any rank serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from commhooks.compressors.kernels.codes import CodePlaces
from commhooks.compressors.powersgd.matrices import MatrixForm
from commhooks.devices import copied_to
from commhooks.language import BucketView, Context, Layout, Slot, Tile
from commhooks.language.entries import first_server
from commhooks.language.noise import Keys


class Share(NamedTuple):
    """The blocks of a parameter that this rank serves, and their rows among all that it serves."""

    slot: Slot
    rows: slice


class CodedPiece(NamedTuple):
    """Some of a bucket's blocks, one after another in its memory, and the places of their codes in messages."""

    tile: Tile
    places: CodePlaces


class Deal:
    """The assignment of a bucket's blocks to ranks: the next block is always served by the next rank."""

    def __init__(
        self, bucket: BucketView, block: int, at_once: int, pays: Callable[[int], bool], context: Context
    ) -> None:
        ranks, device = context.world_size, bucket.memory.device
        self.ranks = ranks
        """W."""
        self.coded: list[Slot] = [slot for slot in bucket.slots if pays(slot.gradient.numel())]
        blocks = [slot.gradient.numel() // block for slot in self.coded]
        self.rest: list[tuple[Slot, Tile]] = [
            (slot, slot.tile) for slot in bucket.slots if not pays(slot.gradient.numel())
        ]
        """Slots with elements that are averaged uncompressed, and the tiles of these."""
        tiles, total = list[Tile](), 0
        for run in _runs(self.coded, block):
            tile = bucket.run(run)
            whole = tile.gradient.numel() // block
            tiles += tile.rows(MatrixForm(whole, block), at_once)
            total += whole
            self.rest += [(run[-1], rest) for rest in tile.rest(whole * block)]
        self.shares: list[Share] = []
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
        self.longest: int = int(held.max())
        """b."""
        servers, places = numpy.concatenate(found).reshape(-1, 2).T
        flat = servers * self.longest + places
        self.sizes: list[int] = [len(tile.gradient) for tile in tiles]
        """The numbers of blocks to send and write at a time, in the bucket's order."""
        on_device = (
            copied_to(device, torch.from_numpy(one.copy())).split(self.sizes) for one in (servers, places, flat)
        )
        self.pieces: list[CodedPiece] = [
            CodedPiece(tile, CodePlaces(*own)) for tile, *own in zip(tiles, *on_device, strict=True)
        ]
        of_rows = numpy.full(ranks * self.longest, total)
        of_rows[flat] = numpy.arange(total)
        unused = numpy.flatnonzero(of_rows == total)
        rows = (unused // self.longest, unused % self.longest, unused)
        self.padding: CodePlaces = CodePlaces(*(copied_to(device, torch.from_numpy(one)) for one in rows))
        """The places of rows without a block."""
        named = [
            Keys.of("", 0, block),
            *(Keys.of(slot.name, n, block) for slot, n in zip(self.coded, blocks, strict=True)),
        ]
        keys = Keys.together(named)
        self.keys: Keys = keys.on(device)
        served = of_rows[context.rank * self.longest :][: held[context.rank]]
        self.own_keys: Keys = keys.at(torch.from_numpy(served)).on(device)
        self.served: int = len(served)
        """The number of blocks that this rank serves."""
        self.own_sizes: list[int] = [min(at_once, self.served - first) for first in range(0, self.served, at_once)]
        """The numbers of them to serve at a time."""
        self.layout: Layout = Layout(tuple(slot.name for slot in self.coded), tuple(blocks))


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


class ShardShare(NamedTuple):
    """A slot's shard on this rank: its blocks in each row of a message, and the elements beyond them in another."""

    slot: Slot
    blocks: slice
    ends: slice


class ShardDeal:
    """The assignment of a bucket of shards to the ranks that own them: row r of a message is rank r's.

    Each slot has room in every row for the most blocks, and the most elements beyond them, that any rank has of it.
    """

    def __init__(self, bucket: BucketView, block: int, at_once: int, context: Context) -> None:
        device = bucket.memory.device
        tiles, of_ranks, of_rows = list[Tile](), list[Tensor](), list[Tensor]()
        self.shares: list[ShardShare] = []
        self.rest: list[tuple[Tile, int, slice]] = []
        """The elements beyond shards' blocks, with their rank and their place in its row."""
        self.longest: int = 0
        self.ends: int = 0
        """The numbers of blocks and of other elements in a row."""
        keys = [Keys.of("", 0, block)]
        for slot in bucket.slots:
            lengths = [tile.gradient.numel() for tile in slot.shards]
            for rank, (tile, length) in enumerate(zip(slot.shards, lengths, strict=True)):
                whole = length // block
                tiles += tile.rows(MatrixForm(whole, block), at_once) if whole else []
                of_rows.append(torch.arange(self.longest, self.longest + whole, dtype=torch.int64, device=device))
                of_ranks.append(torch.full_like(of_rows[-1], rank))
                ends = slice(self.ends, self.ends + length % block)
                self.rest += [(rest, rank, ends) for rest in tile.rest(whole * block)]
                keys.append(Keys.of(f"{slot.name}/{rank}", whole, block))
                if rank == context.rank:
                    self.shares.append(ShardShare(slot, slice(self.longest, self.longest + whole), ends))
            self.longest += max(length // block for length in lengths)
            self.ends += max(length % block for length in lengths)
        self.keys: Keys = Keys.together(keys).on(device)
        self.sizes: list[int] = [len(tile.gradient) for tile in tiles]
        ranks, rows = torch.cat(of_ranks), torch.cat(of_rows)
        places = (one.split(self.sizes) for one in (ranks, rows, ranks * self.longest + rows))
        self.pieces: list[CodedPiece] = [
            CodedPiece(tile, CodePlaces(*own)) for tile, *own in zip(tiles, *places, strict=True)
        ]
