"""Two hops: codes that cannot be summed are exchanged, decoded, added up, encoded again, and gathered.

Source: Tang et al., "1-bit Adam", ICML 2021, section 5, and "DoubleSqueeze", ICML 2019.
Idea: each rank serves some blocks for all. It receives their codes from every rank, adds up the decoded blocks in fp32,
and sends the code of the mean to all; that code's error stays on this rank, as the server error, for the next step.
Bytes on the wire: two codes per element, whatever the number of ranks; elements beyond a parameter's last whole block
are sent uncompressed, as are parameters whose few blocks' codes, padded to the same number for each rank, would take
more bytes. Weakness: two rounds, and a mean that is coded twice.

Legend: n elements in B whole blocks; W ranks; b blocks per rank, padded; y the blocks that this rank serves.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.compressors.dealing import Deal, ShardDeal
from commhooks.compressors.kernels.codes import CodecPasses, CodePlaces, passes_for, payloads_of
from commhooks.compressors.whole import average_whole
from commhooks.errors import SettingsError
from commhooks.language import FEEDBACK_LAWS, Compressor, Context, Entry, Exchange, Loss, Place, Sends, Tile, setting
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import side_by_side
from commhooks.language.entries import Declared
from commhooks.language.memory import surely
from commhooks.language.noise import Keys, Noise
from commhooks.language.randomness import stable_seed
from commhooks.language.requests import AllGather, AllReduce, AllToAll, Flags, Judge, MessageBuffer, Part
from commhooks.tensors import computing_dtype, mean_in_order

SERVER_ERROR = "server error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoHop(Compressor):
    """A compressor that exchanges and gathers the codes of `codec`: three collectives per bucket, in two rounds."""

    codec: Codec
    server_feedback: bool = True
    """False: the second code's error is lost."""
    damping: float | None = setting(None, above=0, most=1)
    """Decoded values are multiplied by this: 1/(1 + ω) makes an unbiased codec with an error of ω ≥ 1 usable with error
    feedback. Lower: less is sent per step. None: 1, and error feedback rejects such a codec; any explicit number, even
    1, is accepted."""
    seed: int = 0
    """Seeds the random numbers of `codec`, together with the step, the parameter's name, the rank and the hop."""

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

        Each rank sends rows for the most blocks that any rank serves, to every rank and once to all. Nothing else
        counts, so the answer does not depend on the division into buckets, and no bucket sends more than its elements
        in fp32.
        """
        blocks = elements // self.codec.block
        rows = -(-blocks // world_size)
        return blocks > 0 and (world_size + 1) * rows * _bytes_of_block(self.codec) <= 4 * blocks * self.codec.block

    sends = Sends.ANYTHING  # what is sent cannot be summed

    def why_whole(self, place: Place) -> str | None:
        """Return that the parameter, or a rank's shard of it, has too few blocks, if so."""
        elements, ranks, block = place.parameter.numel(), place.world_size, self.codec.block
        if elements // ranks >= block if place.is_sharded else self.pays(elements, ranks):
            return None
        return f"blocks have {block:,} elements, too many to be divided among {ranks:,} ranks"

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return the codec's loss, damped, if the parameter has a whole block.

        That is sent as a code unless there are too many ranks.
        """
        return self._loss if parameter.numel() >= self.codec.block else None

    @property
    def exempt(self) -> Mapping[str, str]:
        """Name the laws of error feedback, if there is none for the second code."""
        return (
            {}
            if self.server_feedback
            else dict.fromkeys((*FEEDBACK_LAWS, "wire"), "what the second code loses is lost")
        )

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
        ranks = context.world_size
        passes = passes_for(self.codec, self.damping, computing_dtype(bucket.memory.dtype), bucket.memory.device)
        # Compiled passes take more; whether they are in use may change with the environment.
        n, is_apart = self.codec.block, bucket.scratch.is_needed
        at_once = passes.blocks_at_once(bucket.memory.device, apart=is_apart)
        deal = bucket.plan((self, at_once), lambda: Deal(bucket, n, at_once, lambda m: self.pays(m, ranks), context))
        exchanges = [self._average_blocks(passes, deal, bucket, context)] if deal.coded else []
        return side_by_side([*exchanges, average_whole(deal.rest)] if deal.rest else exchanges)

    def _average_blocks(self, passes: CodecPasses, deal: Deal, bucket: BucketView, context: Context) -> Exchange:
        payloads = payloads_of(self.codec, computing_dtype(bucket.memory.dtype))
        kinds = [((deal.longest, *shape), dtype) for shape, dtype in payloads]
        message = MessageBuffer(kinds, deal.ranks, bucket.borrow, to_all=False)
        flaw = self._send(passes, message.places, deal, bucket, context)
        for payload in message.places if len(deal.padding.rows) else ():
            payload[deal.padding.ranks, deal.padding.rows] = 0
        if flaw is None:
            received = yield AllToAll(*message.parts(deal.layout))  # each [W, b, ...]
        else:
            # Sent as a mean, although it is only 0 or NaN, so that it can be packed with the rest.
            flawed = AllReduce(deal.coded[0].part(flaw), average=True)
            received, (flaw,) = yield AllToAll(*message.parts(deal.layout)), flawed
        if not bucket.scratch.is_needed:  # what is left out is in the bucket's memory: nothing is decoded again
            bucket.give_back(message.memory)

        coded = MessageBuffer(kinds, deal.ranks, bucket.borrow, to_all=True)
        left = self._serve(passes, received, coded.places, deal, bucket, context)
        del received
        bucket.give_back(message.room)
        gathered = yield AllGather(*coded.parts(deal.layout), last=True)  # each [W, b, ...]

        bucket.give_back(coded.memory)
        means = (passes.write(gathered, places, torch.empty_like(tile.room)) for tile, places in deal.pieces)
        largest = deal.coded[0].tile.in_own_range(means)
        flaws = () if flaw is None else (flaw,)
        finite = yield Judge(*flaws, *passes.evidence(gathered), *largest)
        is_taken = self._takes_errors(passes, deal)
        for share in deal.shares if self.server_feedback and not is_taken else ():
            share.slot.commit(SERVER_ERROR, left[share.rows], finite)
        bucket.settle(finite)
        is_sound = flaw is None or surely(flaw == 0)
        for tile, places in deal.pieces:
            _keep_unsent(passes, tile, message.places, places, bucket, finite)
            mean = passes.write(gathered, places, tile.room)
            tile.write(mean if is_sound else mean.add_(*flaws))

    def _send(
        self,
        passes: CodecPasses,
        message: Sequence[Tensor],
        deal: Deal | ShardDeal,
        bucket: BucketView,
        context: Context,
    ) -> Tensor | None:
        """Encode all blocks into a message; return [0], or [NaN] if codes hide one, or None if they show it."""
        flaws = []
        noises = _split(self._noise(deal.keys, context, "own"), deal.sizes)
        for (tile, places), noise in zip(deal.pieces, noises, strict=True):
            if passes.exchanges_state and (residuals := tile.residuals_to_take()):
                flaw = passes.send(tile.gradient, noise, message, places, keeps=True, residuals=residuals)
                tile.took()
            else:
                keeps = tile.keeps and not bucket.scratch.is_needed
                flaw = passes.send(tile.form(), noise, message, places, keeps=keeps)
            flaws += [] if flaw is None else [flaw]
        return torch.stack(flaws).sum(0, keepdim=True, dtype=torch.float32) if flaws else None

    def _serve(
        self,
        passes: CodecPasses,
        received: Sequence[Tensor],
        coded: Sequence[Tensor],
        deal: Deal,
        bucket: BucketView,
        context: Context,
    ) -> Tensor:
        """Encode the means of the blocks that this rank serves; return the codes' errors.

        If `_takes_errors`, the server errors are overwritten with these, and what they were is returned.
        """
        noises = _split(self._noise(deal.own_keys, context, "server"), deal.own_sizes)
        is_taken = self._takes_errors(passes, deal)
        kept = deal.served if self.server_feedback else 0
        left = bucket.borrow((kept, self.codec.block), computing_dtype(bucket.memory.dtype))
        errors = [share.slot.state(SERVER_ERROR) for share in deal.shares] if is_taken else []
        for share in deal.shares if self.server_feedback and not is_taken else ():
            left[share.rows].copy_(share.slot.state(SERVER_ERROR), non_blocking=True)
        sizes = deal.own_sizes
        of_ranks = zip(*([payload[:, : deal.served].split(sizes, 1) for payload in received]), strict=True)
        codes = zip(*([payload[: deal.served].split(sizes) for payload in coded]), strict=True)
        lefts = left.split(sizes) if self.server_feedback else itertools.repeat(None, len(sizes))
        of_pieces = _cut(errors, sizes) if errors else itertools.repeat((), len(sizes))
        for theirs, noise, code, own, taken in zip(of_ranks, noises, codes, lefts, of_pieces, strict=True):
            passes.serve(theirs, noise, code, own, taken)
            if own is not None and taken:
                bucket.took(taken, own.split([len(error) for error in taken]))
        for payload in coded if deal.served < deal.longest else ():
            payload[deal.served :] = 0
        return left

    def _takes_errors(self, passes: CodecPasses, deal: Deal) -> bool:
        """Return whether server errors are added and overwritten in one pass, before the verdict."""
        if not (self.server_feedback and passes.exchanges_state):
            return False
        states = [share.slot.state(SERVER_ERROR) for share in deal.shares]
        return all(one.is_cpu and one.dtype is torch.float32 and one.is_contiguous() for one in states)

    def _noise(self, keys: Keys, context: Context, hop: str) -> Noise | None:
        """Return the noise of the blocks with these keys, if the codec draws any."""
        if not self.codec.draws:
            return None
        table = stable_seed("two-hop", self.seed, context.step)
        return Noise.of(keys, self.codec.block, table, stable_seed(table, context.rank, hop))

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Exchange the codes of each rank's shard: one hop, since no other rank needs the mean.

        A block is coded if it lies within one shard; the rest of a shard is sent uncompressed.
        """
        # Eager: compiled passes would give scales that are sums other last bits than sharded runs have had so far.
        passes = CodecPasses(self.codec, self.damping)
        n, at_once = self.codec.block, passes.blocks_at_once(bucket.memory.device)
        deal = bucket.plan((self, "shards"), lambda: ShardDeal(bucket, n, at_once, context))
        ranks, dtype = len(bucket.memory), computing_dtype(bucket.memory.dtype)
        kinds = payloads_of(self.codec, dtype)
        sent = [bucket.memory.new_zeros(ranks, deal.longest, *shape, dtype=kind) for shape, kind in kinds]
        ends = bucket.memory.new_zeros(ranks, deal.ends, dtype=dtype)
        flaw = self._send(passes, sent, deal, bucket, context)
        for tile, row, own in deal.rest:
            ends[row, own] = tile.form()
        decoded = (passes.write(sent, places, torch.empty_like(tile.room)) for tile, places in deal.pieces)
        seen = [ends, *passes.evidence(sent), *bucket.slots[0].shards[0].in_own_range(decoded)]
        seen += [] if flaw is None else [flaw]
        is_flagged = bucket.keeps or not self.codec.shows_non_finite
        flags = [Flags.of(seen, ranks)] if is_flagged else []
        *received, of_ends = yield AllToAll(*flags, *map(Part, sent), Part(ends), last=True)

        flaws = received.pop(0) if is_flagged else ends.new_zeros(())
        if bucket.keeps:
            finite = yield Judge(flaws)
            for tile, places in deal.pieces:
                _keep_unsent(passes, tile, sent, places, bucket, finite)
            for tile, _, _ in deal.rest:
                tile.keep(tile.room.zero_(), finite)
        for slot, blocks, own in deal.shares:
            coded, rest = slot.mean.tensor_split([(blocks.stop - blocks.start) * n])
            pieces = zip(*(payload[:, blocks].split(at_once, 1) for payload in received), strict=True)
            for place, theirs in zip(coded.view(-1, n).split(at_once), pieces, strict=True) if len(coded) else ():
                place.copy_(passes.mean(theirs))
            first, *others = of_ends[:, own]
            rest.copy_(mean_in_order(first, others, ranks))
            if not self.codec.shows_non_finite:
                slot.mean.add_(flaws.sum())


def _keep_unsent(
    passes: CodecPasses, tile: Tile, sent: Sequence[Tensor], places: CodePlaces, bucket: BucketView, finite: Tensor
) -> None:
    """Keep what the code of a tile's blocks leaves out, which `_send` has left in the bucket's memory if it is wide."""
    if tile.keeps and not tile.is_taken:
        M = tile.form()
        if bucket.scratch.is_needed:
            M.sub_(passes.write(sent, places, torch.empty_like(M)))
        tile.keep(M, finite)


def _cut(blocks: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[list[Tensor]]:
    """Yield blocks [.., n] of several tensors, one after another, in pieces of these numbers of blocks."""
    tensors, first = iter(blocks), blocks[0][:0]
    for size in sizes:
        piece = list[Tensor]()
        left = size
        while left:
            first = first if len(first) else next(tensors)
            piece.append(first[:left])
            left, first = left - len(piece[-1]), first[left:]
        yield piece


def _split(noise: Noise | None, sizes: Sequence[int]) -> Iterable[Noise | None]:
    """Return the noise in pieces of `sizes` blocks."""
    return itertools.repeat(None, len(sizes)) if noise is None else noise.split(sizes)


def _bytes_of_block(codec: Codec) -> int:
    """Return the bytes of a block's code, for a parameter in fp32."""
    return sum(shape.numel() * dtype.itemsize for shape, dtype in payloads_of(codec, torch.float32))
