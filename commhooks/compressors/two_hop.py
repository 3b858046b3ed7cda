"""Two hops: codes that cannot be summed are exchanged, decoded, added up, coded again, and gathered.

Source: Tang et al., "1-bit Adam", ICML 2021, section 5, and "DoubleSqueeze", ICML 2019.
Idea: each rank serves some blocks for all. It receives their codes from every rank, adds them up in fp32, and sends the
code of the mean on; what that code leaves out stays with it, as the server's error, for the next step.
Bytes on the wire: two codes an element, whatever the number of ranks; elements beyond a parameter's last whole block
ride uncompressed. Weakness: two rounds, and a mean that is coded twice.

Legend: n elements in B whole blocks; W ranks; b blocks a rank, padded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.errors import CompressorError, SettingsError
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Compressor, Context, Exchange, side_by_side
from commhooks.language.entries import Declared, Entry, blocks_served
from commhooks.language.requests import AllGather, AllReduce, AllToAll, Judge, Layout, Part

SERVER_ERROR = "server error"


class _Share(NamedTuple):
    """The blocks of one parameter that this rank serves, as rows of all that it serves."""

    slot: Slot
    start: int
    end: int


class _Plan:
    """Which rank serves which of a bucket's blocks, as row numbers; rows beyond a rank's last are padding."""

    def __init__(self, bucket: BucketView, block: int, context: Context) -> None:
        self.coded = [slot for slot in bucket.slots if slot.gradient.numel() >= block]
        self.blocks = [slot.gradient.numel() // block for slot in self.coded]
        self.rest = [slot for slot in bucket.slots if slot.gradient.numel() % block]
        rows: list[list[int]] = [[] for _ in range(context.world_size)]
        self.shares, first = [], 0
        for slot, blocks in zip(self.coded, self.blocks, strict=True):
            begin = len(rows[context.rank])
            for rank, own in enumerate(rows):
                own += [first + number for number in blocks_served(slot.name, blocks, rank, context.world_size)]
            self.shares.append(_Share(slot, begin, len(rows[context.rank])))
            first += blocks
        longest = max(map(len, rows))
        padded = [own + [first] * (longest - len(own)) for own in rows]  # the row behind the last block is zero
        self.rows = torch.tensor(padded, dtype=torch.long, device=bucket.memory.device).reshape(
            context.world_size, longest
        )
        places = self.rows.new_empty(first + 1)
        places[self.rows.flatten()] = torch.arange(self.rows.numel(), device=places.device)
        self.places = places[:first].split(self.blocks)
        """Where a slot's blocks come to lie when those of all ranks are gathered."""
        self.layout = Layout(tuple(slot.name for slot in self.coded), tuple(self.blocks))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoHop(Compressor):
    """Average by exchanging and gathering the codes of `codec`: three collectives a bucket, in two rounds."""

    codec: Codec
    server_feedback: bool = True
    """Off: what the second code leaves out is lost."""

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise SettingsError(f"TwoHop(codec={self.codec!r}): codec must be a Codec, such as Sign().")
        if self.codec.block < 1:
            raise SettingsError(f"TwoHop(codec={self.codec!r}): block must be at least 1.")

    def state(self, name: str, parameter: Tensor, world_size: int) -> Declared:
        """Return the server's error of the blocks that this rank serves."""
        has_blocks = self.server_feedback and parameter.numel() >= self.codec.block
        return {SERVER_ERROR: Entry(kind="share", block=self.codec.block)} if has_blocks else {}

    @property
    def only_sums(self) -> bool:
        """Return False: what is sent cannot be summed."""
        return False

    def loses(self, name: str, parameter: Tensor) -> bool:
        """Return whether the parameter has a whole block."""
        return parameter.numel() >= self.codec.block

    def relative_error(self, elements: int) -> float:
        """Return the codec's."""
        return self.codec.relative_error() if elements >= self.codec.block else 0.0

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Exchange the codes of all blocks, and gather the codes of their means; average the rest meanwhile."""
        plan = bucket.plan(self, lambda: _Plan(bucket, self.codec.block, context))
        exchanges = [self._average_blocks(plan, context)] if plan.coded else []
        return side_by_side([*exchanges, self._average_rest(plan)] if plan.rest else exchanges)

    def _average_blocks(self, plan: _Plan, context: Context) -> Exchange:
        codes = [self._encode(self._blocks(slot.form())) for slot in plan.coded]
        rows = [torch.cat([*of_slots, of_slots[0][:1] * 0]) for of_slots in zip(*codes, strict=True)]
        received = yield AllToAll(*(Part(payload[plan.rows], plan.layout) for payload in rows))  # each [W, b, ...]

        served = self._decode([payload[0] for payload in received])  # b×block; ranks are added in rank order
        for rank in range(1, context.world_size):
            served += self._decode([payload[rank] for payload in received])
        served /= context.world_size
        for share in plan.shares if self.server_feedback else ():
            served[share.start : share.end] += share.slot.state(SERVER_ERROR).to(served)
        code = self._encode(served)
        gathered = yield AllGather(*(Part(payload, plan.layout) for payload in code), last=True)  # each [W, b, ...]

        to_judge = [payload for payload in gathered if payload.is_floating_point()]
        if plan.coded[0].tile.has_short_range:
            means = [self._decode([payload[rank] for payload in gathered]) for rank in range(context.world_size)]
            to_judge += [mean.abs().amax().to(plan.coded[0].gradient.dtype) for mean in means]
        finite = yield Judge(*to_judge)
        if self.server_feedback:
            served -= self._decode(code)
            for share in plan.shares:
                share.slot.commit(SERVER_ERROR, served[share.start : share.end], finite)
        for slot, own, at in zip(plan.coded, codes, plan.places, strict=True):
            M = slot.form()
            self._blocks(M).sub_(self._decode(own))
            M[len(at) * self.codec.block :] = 0
            slot.keep(M, finite)
            mean = slot.room
            self._blocks(mean).copy_(self._decode([payload.flatten(0, 1)[at] for payload in gathered]))
            slot.write(mean)

    def _average_rest(self, plan: _Plan) -> Exchange:
        starts = [slot.gradient.numel() // self.codec.block * self.codec.block for slot in plan.rest]
        tails = [slot.form()[start:].clone() for slot, start in zip(plan.rest, starts, strict=True)]
        parts = [slot.part(tail) for slot, tail in zip(plan.rest, tails, strict=True)]
        means = yield AllReduce(*parts, average=True, last=True)
        yield Judge(*means)
        for slot, start, mean in zip(plan.rest, starts, means, strict=True):
            slot.gradient[start:] = mean  # after the blocks' mean, which was written with zeros here

    def _encode(self, blocks: Tensor) -> Sequence[Tensor]:
        code = self.codec.encode(blocks)
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
        return blocks

    def _blocks(self, memory: Tensor) -> Tensor:
        """View the whole blocks of 1-D memory."""
        return memory[: memory.numel() // self.codec.block * self.codec.block].view(-1, self.codec.block)
