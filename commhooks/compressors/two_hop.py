"""Two hops: codes that cannot be summed are exchanged, decoded, added up, encoded again, and gathered.

Source: Tang et al., "1-bit Adam", ICML 2021, section 5, and "DoubleSqueeze", ICML 2019.
Idea: each rank serves some blocks for all. It receives their codes from every rank, adds up the decoded blocks in fp32,
and sends the code of the mean to all; what that code leaves out stays on this rank, as the server error, for the next
step.
Bytes on the wire: two codes per element, whatever the number of ranks; elements beyond a parameter's last whole block
are sent uncompressed, and so are parameters with so few blocks that their codes, padded to equally many for each rank,
would take more bytes. Weakness: two rounds, and a mean that is coded twice. Each element is encoded once and decoded
three times, so a step takes about twice as long as the codec's own docstring says.

Legend: n elements in B whole blocks; W ranks; b blocks per rank, padded; y the blocks that this rank serves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy
import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.compressors.whole import average_from
from commhooks.devices import copied_to
from commhooks.errors import CompressorError, SettingsError
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Compressor, Context, Exchange, side_by_side
from commhooks.language.entries import Declared, Entry, first_server
from commhooks.language.loss import Loss, Sends
from commhooks.language.place import Place
from commhooks.language.randomness import seeded_uniform, stable_seed
from commhooks.language.requests import AllGather, AllReduce, AllToAll, Judge, Layout, Part
from commhooks.language.settings import setting
from commhooks.language.shards import Flags
from commhooks.language.tile import Tile
from commhooks.tensors import computing_dtype, mean_in_order

SERVER_ERROR = "server error"
_AT_ONCE = 1 << 16
"""How many elements are encoded at a time, so that temporary memory stays in the processor's cache."""


class _Share(NamedTuple):
    """The blocks of one parameter that this rank serves, as rows among all that it serves."""

    slot: Slot
    start: int
    end: int


class _Plan:
    """Which rank serves which of a bucket's blocks, as rows of a message; rows beyond a rank's last are padding."""

    def __init__(self, bucket: BucketView, compressor: TwoHop, context: Context) -> None:
        block, ranks = compressor.codec.block, context.world_size
        self.coded = [slot for slot in bucket.slots if compressor.pays(slot.gradient.numel(), ranks)]
        self.blocks = [slot.gradient.numel() // block for slot in self.coded]
        ends = {slot: blocks * block for slot, blocks in zip(self.coded, self.blocks, strict=True)}
        sizes = [(slot, ends.get(slot, 0), slot.gradient.numel()) for slot in bucket.slots]
        self.rest = [(slot, start) for slot, start, end in sizes if start < end]
        """What is sent uncompressed: slots, and their first elements that are."""
        self.at_once = max(1, _AT_ONCE // block)
        self.shares = []
        held = numpy.zeros(context.world_size, dtype=numpy.int64)  # blocks that each rank serves so far
        found = []
        for slot, blocks in zip(self.coded, self.blocks, strict=True):
            numbers = numpy.arange(blocks)
            servers = (numbers + first_server(slot.name, context.world_size)) % context.world_size
            found.append((servers, held[servers] + numbers // context.world_size))
            begin = int(held[context.rank])
            held += numpy.bincount(servers, minlength=context.world_size)
            if held[context.rank] > begin:
                self.shares.append(_Share(slot, begin, int(held[context.rank])))
        self.longest = int(held.max())
        device = bucket.memory.device
        places = [copied_to(device, torch.from_numpy(servers * self.longest + rows)) for servers, rows in found]
        self.places = [own.split(self.at_once) for own in places]
        """The positions of a slot's blocks among the W·b of a message, for some blocks at a time."""
        self.knows_unsent = not bucket.scratch.is_needed
        """Whether `form` returns the bucket's own memory, so that what is left out can be written back there."""
        self.layout = Layout(tuple(slot.name for slot in self.coded), tuple(self.blocks))


class _Column(NamedTuple):
    """Where a slot's blocks begin in each row of a message of shards, and the ends of its shards."""

    block: int
    end: int


class _Columns(NamedTuple):
    """How the rows of a message of shards are divided among slots: room for the most that any rank has of each."""

    columns: Sequence[_Column]
    blocks: int
    ends: int
    block: int
    at_once: int

    @classmethod
    def of(cls, bucket: BucketView, block: int) -> _Columns:
        columns, blocks, ends = [], 0, 0
        for slot in bucket.slots:
            columns.append(_Column(blocks, ends))
            lengths = [tile.gradient.numel() for tile in slot.shards]
            blocks += max(length // block for length in lengths)
            ends += max(length % block for length in lengths)
        return cls(columns, blocks, ends, block, max(1, _AT_ONCE // block))

    def tiles(self, bucket: BucketView) -> Iterator[tuple[Tile, int, _Column, str]]:
        """Yield every slot's shards: the tile, its rank, the slot's columns and name."""
        for slot, column in zip(bucket.slots, self.columns, strict=True):
            for rank, tile in enumerate(slot.shards):
                yield tile, rank, column, slot.name

    def pieces(self, memory: Tensor, at_once: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield some blocks of 1-D memory at a time, [blocks, block], each time after the number of the first."""
        blocks = memory.view(-1, self.block)
        at_once = max(1, at_once or self.at_once)
        for start in range(0, len(blocks), at_once):
            yield start, blocks[start : start + at_once]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoHop(Compressor):
    """A compressor that exchanges and gathers the codes of `codec`: three collectives per bucket, in two rounds."""

    codec: Codec
    server_feedback: bool = True
    """Off: what the second code leaves out is lost."""
    damping: float | None = setting(None, above=0, most=1)
    """Decoded values are multiplied by this: 1/(1 + ω) makes an unbiased codec with an error of ω ≥ 1 usable with error
    feedback. Lower: less is sent per step. None: 1, and error feedback rejects such a codec; any explicit number, even
    1, is accepted."""
    seed: int = 0
    """Seeds what `codec` draws, together with the step, the parameter's name, the rank and the hop."""

    @classmethod
    def of(
        cls,
        codec: Callable[..., Codec],
        *,
        server_feedback: bool = True,
        damping: float | None = None,
        seed: int = 0,
        **settings: Any,
    ) -> Self:
        """Make one from a codec's class and its settings, side by side with the others."""
        return cls(codec=codec(**settings), server_feedback=server_feedback, damping=damping, seed=seed)

    def check(self, named: Mapping[str, Tensor], world_size: int | None) -> None:
        """Raise `SettingsError` if the server error of a parameter would grow without bound."""
        error = self._loss.contraction
        if self.server_feedback and error >= 1 and self.damping is None:
            raise SettingsError(
                f"TwoHop(codec={self.codec!r}): the codec may lose {error:.3g} times what it is given (squared norms), "
                "so the server error would grow without bound; set damping, or server_feedback=False."
            )

    def state(self, place: Place) -> Declared:
        """Return the entry for the server error of the blocks that this rank serves."""
        serves = self.server_feedback and not place.is_sharded  # of shards, each rank serves itself alone
        has_error = serves and self.pays(place.parameter.numel(), place.world_size)
        return {SERVER_ERROR: Entry(kind="share", block=self.codec.block)} if has_error else {}

    def pays(self, elements: int, world_size: int) -> bool:
        """Return whether the codes of a parameter's whole blocks take no more bytes than sums in fp32 would.

        Each rank sends as many rows as the one that serves most, to every rank and once to all. Nothing else counts, so
        the answer does not depend on how buckets are cut, and no bucket sends more than its elements in fp32.
        """
        blocks = elements // self.codec.block
        rows = -(-blocks // world_size)
        return blocks > 0 and (world_size + 1) * rows * _bytes_of_block(self.codec) <= 4 * blocks * self.codec.block

    sends = Sends.ANYTHING  # what is sent cannot be summed

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return the codec's loss, damped, if the parameter has a whole block.

        That is sent as a code unless there are too many ranks.
        """
        return self._loss if parameter.numel() >= self.codec.block else None

    @property
    def _loss(self) -> Loss:
        codec, damping = self.codec, self.damping or 1.0
        error = codec.relative_error()
        omega = (1 - damping) ** 2 + damping**2 * error if codec.is_unbiased else self._damped(error)
        return Loss(
            omega,
            in_another_norm=self._damped(codec.contraction()),
            unbiased=codec.is_unbiased and damping == 1 and not self.server_feedback,
            damped=self.damping is not None,
        )

    def _damped(self, error: float) -> float:
        """Return the largest error, in any norm, of a code that is multiplied by `damping`."""
        damping = self.damping or 1.0
        return (1 - damping + damping * math.sqrt(error)) ** 2

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Exchange the codes of all blocks, and gather the codes of their means; average the rest meanwhile."""
        plan = bucket.plan(self, lambda: _Plan(bucket, self, context))
        exchanges = [self._average_blocks(plan, context)] if plan.coded else []
        # The rest comes last: the blocks' mean was written with zeros there.
        return side_by_side([*exchanges, average_from(plan.rest)] if plan.rest else exchanges)

    def _average_blocks(self, plan: _Plan, context: Context) -> Exchange:
        sent, flaw = self._encode_all(plan, context)  # each [W·b, ...]
        parts = [Part(payload.unflatten(0, (context.world_size, -1)), plan.layout) for payload in sent]
        if plan.knows_unsent:
            sent = []
        if self.codec.shows_non_finite:
            received = yield AllToAll(*parts)  # each [W, b, ...]
        else:
            # Sent as a mean, although it is only 0 or NaN, so that it can be packed with the rest.
            received, (flaw,) = yield AllToAll(*parts), AllReduce(plan.coded[0].part(flaw), average=True)
        del parts

        coded, left = self._serve(received, plan, context)
        del received  # the largest tensors here: what follows may reuse their memory
        gathered = yield AllGather(*(Part(payload, plan.layout) for payload in coded), last=True)  # each [W, b, ...]

        gathered = [payload.flatten(0, 1) for payload in gathered]
        codes = zip(*(payload.split(plan.at_once) for payload in gathered), strict=True)
        largest = plan.coded[0].tile.in_own_range(map(self._decode, codes))
        finite = yield Judge(flaw, *self.codec.evidence(gathered), *largest)
        for share in plan.shares if self.server_feedback else ():
            share.slot.commit(SERVER_ERROR, left[share.start : share.end], finite)
        for slot, places in zip(plan.coded, plan.places, strict=True):
            M = slot.form()
            for blocks, at in self._tiles(M, places) if sent and slot.tile.keeps else ():
                blocks.sub_(self._decode([payload.index_select(0, at) for payload in sent]))
            M[M.numel() // self.codec.block * self.codec.block :] = 0
            slot.keep(M, finite)
            mean = slot.room
            for blocks, at in self._tiles(mean, places):
                blocks.copy_(self._decode([payload.index_select(0, at) for payload in gathered]))
            slot.write(mean if self.codec.shows_non_finite else mean.add_(flaw))

    def _encode_all(self, plan: _Plan, context: Context) -> tuple[list[Tensor], Tensor]:
        """Return the codes of all blocks, in the order in which ranks serve them, and 0, or NaN if codes hide one."""
        sent: list[Tensor] = []
        flaw = torch.zeros(1, device=plan.coded[0].gradient.device)
        for slot, places in zip(plan.coded, plan.places, strict=True):
            M = slot.form()
            if not self.codec.shows_non_finite:
                flaw += M.abs().amax() * 0
            for number, (blocks, at) in enumerate(self._tiles(M, places)):
                code = self._encode(blocks, context, slot.name, "own", number)
                sent = sent or [part.new_zeros(context.world_size * plan.longest, *part.shape[1:]) for part in code]
                for payload, part in zip(sent, code, strict=True):
                    payload.index_copy_(0, at, part)
                if plan.knows_unsent and slot.tile.keeps:
                    blocks.sub_(self._decode(code))
        return sent, flaw

    def _serve(self, received: Sequence[Tensor], plan: _Plan, context: Context) -> tuple[list[Tensor], Tensor]:
        """Return the codes of the means of the blocks that this rank serves, and what the codes leave out."""
        coded = [torch.zeros_like(payload[0]) for payload in received]
        left = torch.zeros(0)
        at_once = max(1, plan.at_once // context.world_size)  # blocks, each received from all ranks
        for share in plan.shares:
            for number, start in enumerate(range(share.start, share.end, at_once)):
                own = slice(start, min(start + at_once, share.end))
                of_all = [payload[:, own].flatten(0, 1) for payload in received]
                y = self._mean(of_all, context)
                if self.server_feedback:
                    error = share.slot.state(SERVER_ERROR)[start - share.start : own.stop - share.start]
                    y += error.to(y, non_blocking=True)
                code = self._encode(y, context, share.slot.name, "server", number)
                for payload, part in zip(coded, code, strict=True):
                    payload[own] = part
                if self.server_feedback:
                    left = left if left.numel() else y.new_empty(plan.longest, self.codec.block)
                    torch.sub(y, self._decode(code), out=left[own])
        return coded, left

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Exchange the codes of each rank's shard: one hop, since nobody else needs the mean.

        A block is coded if it lies within one shard; what remains of a shard is sent uncompressed.
        """
        plan = bucket.plan(self, lambda: _Columns.of(bucket, self.codec.block))
        seen: list[Tensor] = []
        sent: list[Tensor] = []
        ends = bucket.memory.new_zeros(len(bucket.memory), plan.ends, dtype=computing_dtype(bucket.memory.dtype))
        for tile, row, column, name in plan.tiles(bucket):
            M = tile.form()
            whole = len(M) // self.codec.block * self.codec.block
            ends[row, column.end : column.end + len(M) - whole] = M[whole:]
            seen += [M.abs().amax()] if len(M) else []
            for start, blocks in plan.pieces(M[:whole]):
                code = self._encode(blocks, context, name, "own", row, start)
                sent = sent or [part.new_zeros(len(bucket.memory), plan.blocks, *part.shape[1:]) for part in code]
                for payload, part in zip(sent, code, strict=True):
                    payload[row, column.block + start : column.block + start + len(blocks)] = part
                seen += [one.abs().amax() for one in self.codec.evidence(code)]
                seen += tile.in_own_range(map(self._decode, [code]))
        is_flagged = bucket.keeps or not self.codec.shows_non_finite
        flags = [Flags.of(seen, context.world_size)] if is_flagged else []
        *received, of_ends = yield AllToAll(*flags, *map(Part, sent), Part(ends), last=True)

        flaw = received.pop(0) if is_flagged else ends.new_zeros(())
        if bucket.keeps:
            finite = yield Judge(flaw)
            for tile, row, column, _ in plan.tiles(bucket):
                M = tile.form()
                for start, blocks in plan.pieces(M[: len(M) // self.codec.block * self.codec.block]):
                    own = slice(column.block + start, column.block + start + len(blocks))
                    blocks.sub_(self._decode([payload[row, own] for payload in sent]))
                M[len(M) // self.codec.block * self.codec.block :] = 0
                tile.keep(M, finite)
        for slot, column in zip(bucket.slots, plan.columns, strict=True):
            whole = len(slot.mean) // self.codec.block * self.codec.block
            for start, place in plan.pieces(slot.mean[:whole], at_once=plan.at_once // context.world_size):
                own = slice(column.block + start, column.block + start + len(place))
                place.copy_(self._mean([payload[:, own].flatten(0, 1) for payload in received], context))
            first, *others = of_ends[:, column.end : column.end + len(slot.mean) - whole]
            slot.mean[whole:] = mean_in_order(first, others, context.world_size)
            if not self.codec.shows_non_finite:
                slot.mean.add_(flaw.sum())

    def _mean(self, of_all: Sequence[Tensor], context: Context) -> Tensor:
        """Return the mean of as many codes as there are ranks, one after another, in rank order."""
        first, *others = self._decode(of_all).unflatten(0, (context.world_size, -1))
        return mean_in_order(first, others, context.world_size)

    def _encode(self, blocks: Tensor, context: Context, *what: str | int) -> Sequence[Tensor]:
        noise = blocks.new_empty(0)
        if self.codec.draws:
            seed = stable_seed("two-hop", self.seed, context.step, context.rank, *what)
            noise = seeded_uniform(tuple(blocks.shape), seed, blocks)
        code = self.codec.encode(blocks, noise)
        if not isinstance(code, (tuple, list)) or any(len(payload) != len(blocks) for payload in code):
            raise CompressorError(
                f"{self.codec!r}.encode must return a tuple of tensors of {len(blocks)} rows, one for each block."
            )
        return code

    def _decode(self, code: Sequence[Tensor]) -> Tensor:
        blocks = self.codec.decode(code)
        if blocks.shape != (len(code[0]), self.codec.block):
            raise CompressorError(
                f"{self.codec!r}.decode must return blocks of shape {(len(code[0]), self.codec.block)} "
                f"(got {tuple(blocks.shape)})."
            )
        return blocks if self.damping is None else blocks.mul_(self.damping)

    def _tiles(self, memory: Tensor, places: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the whole blocks of 1-D memory, some at a time, and the positions of their codes."""
        whole = memory[: memory.numel() // self.codec.block * self.codec.block].view(-1, self.codec.block)
        return zip(whole.split(len(places[0])), places, strict=True)


@functools.cache
def _bytes_of_block(codec: Codec) -> int:
    """Return how many bytes a block's code takes, of a parameter in fp32."""
    block = torch.zeros(1, codec.block, dtype=torch.float32, device="cpu")
    code = codec.encode(block, block if codec.draws else block.new_empty(0))
    return sum(payload.numel() * payload.element_size() for payload in code)
