"""SparseLoCo: the largest elements of each tile, with two bits for each value and twelve for its index.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, algorithm 1, which exchanges the
pseudo-gradients of H local steps this way; nothing here depends on what the gradients are.
Idea: each tile of 64×64 elements sends its 64 largest. A parameter's sent elements fall into four bins, by sign and by
magnitude (above the mean magnitude or not); an element is sent as the number of its bin, and decoded as the bin's mean.
The authors' code (tplr-ai/templar) averages over the ranks that sent an element, and clips each rank's message to the
median norm: `mean_over="senders"` and `clip_to_median=True`.
Bytes on the wire: 64·12/8 + 64·2/8 = 112 for a tile of 4,096 elements, and four means of 4 bytes for each parameter.
The places of a bucket are sent in two runs, of their lowest 8 bits and of the other 4 (packing.py), and then the bins.
Biased: the residual fades, by a factor of 0.95 per step in the paper, and the faded part is never sent. ω for n
elements is at most 1 - 1/(4n), if magnitudes differ most; for normally distributed ones it is slightly above top-k's.
Weakness: every rank receives all others' messages, so the bytes grow with the number of ranks. On a CPU a step takes as
long as 17 to 27 copies of the gradient, or 10 to 13 compiled, most of it for the selection in every tile.

Legend: T tiles of a×b elements; k sent of each tile; W ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from commhooks.compressors.kernels.selection import four_bins, largest_of_tiles
from commhooks.compressors.kernels.sums import PackedNumbers, runs_of, write_sum_of_tiles
from commhooks.compressors.sparse.gathering import are_formed_together
from commhooks.compressors.tiles import MeanOver, TiledParameter, TiledPiece, Tiling, without_padding
from commhooks.devices import copied_to
from commhooks.language import FEEDBACK_LAWS, BucketView, Compressor, Context, Exchange, Loss, Sends, Tile, setting
from commhooks.language.requests import AllGather, Judge, Layout, Part
from commhooks.language.settings import refusal
from commhooks.packing import pack_integers
from commhooks.tensors import root


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseLoCo(Compressor):
    """A compressor that sends `k` elements of each tile: one collective per bucket.

    It has error feedback with a decay of 0.95, unless it is inside `WithoutFeedback`.
    """

    k: int = setting(64, least=1)
    """Lower: smaller messages, but more left in the residual."""
    chunk: int = setting(64, least=2, most=1024)
    """The side of a tile. Larger: smaller messages, but more left in the residual."""
    mean_over: MeanOver = "ranks"
    """"senders", as in the authors' code: an element's sum is divided by the number of ranks that sent it, not of all
    ranks, so the mean is up to W times as long."""
    clip_to_median: bool = False
    """True: a rank's elements of a parameter are scaled down to the median of all ranks' norms if theirs is larger; of
    two norms in the middle, the lower one counts. The difference is lost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > self.chunk**2:
            raise refusal(self, "k", f"must be at most chunk² = {self.chunk**2}")

    sends = Sends.ANYTHING  # what is sent cannot be summed

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return 1 - 1/(4·elements): four means cannot represent all elements.

        The bins' means are the best approximation of the elements sent, so they hold at least (sum of
        magnitudes)²/(T·k) of their squared norm, no less than a (T·k)th; the elements sent hold at least k/(a·b) of the
        total. Padding makes T·a·b at most 4·elements.
        """
        return Loss(1 - 1 / (4 * parameter.numel())) if parameter.numel() else None

    @property
    def exempt(self) -> Mapping[str, str]:
        """Name the laws of error feedback, if the mean is over fewer ranks, or what one has sent is cut."""
        changed = self.mean_over == "senders" or self.clip_to_median
        return dict.fromkeys(FEEDBACK_LAWS, "means are over senders, or clipped") if changed else {}

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Gather every rank's codes; the mean is the sum of the decoded values, in rank order."""
        if not bucket.filled:
            return
        plan = bucket.plan(self, lambda: _Plan.of(bucket, self.k, self.chunk))
        own = [_encoded(one, piece.tile.form()) for piece in plan.pieces for one in piece.parameters]
        means, places, bins = (torch.cat(parts) for parts in zip(*((one[:3]) for one in own), strict=True))
        codes = pack_integers(places, self._place_bits), pack_integers(bins, 2)
        parts = [Part(means, plan.layout_of_means), *(Part(code, plan.layout) for code in codes)]
        answers = yield AllGather(*parts, last=True)

        received = self._received(plan, *answers)
        sums = (self._mean(piece, piece.tile.room, received) for piece in plan.pieces)
        finite = yield Judge(answers[0], *plan.pieces[0].tile.in_own_range(sums))
        values = means.index_select(0, plan.first_bins + bins)
        indices = torch.cat([one.indices for one in own])
        if any(piece.is_padded for piece in plan.pieces):
            values, indices = without_padding(values, indices)
        for piece in plan.pieces:
            M = piece.tile.form()
            M.index_add_(0, indices[piece.entries], values[piece.entries], alpha=-1)
            piece.tile.keep(M, finite)
            piece.tile.write(self._mean(piece, piece.tile.room, received))

    def _received(self, plan: _Plan, means: Tensor, places: Tensor, bins: Tensor) -> _TileMessages:
        """Return what all ranks' bins [W, 4S] stand for, and the packed places and bins."""
        means = means.view(len(means), -1, 4)
        packed = (PackedNumbers(codes, bits, plan.entries) for codes, bits in ((places, self._place_bits), (bins, 2)))
        received = _TileMessages(means, *packed)
        if self.clip_to_median:
            bins = received.bins.numbers
            clipped = [
                _to_the_median(means[:, one.number], bins[:, one.entries])
                for piece in plan.pieces
                for one in piece.parameters
            ]
            means = means * torch.stack(clipped, dim=1)
        return received._replace(means=means / len(means) if self.mean_over == "ranks" else means)

    def _mean(self, piece: TiledPiece, memory: Tensor, received: _TileMessages) -> Tensor:
        """Overwrite memory with the mean of a piece, and return it."""
        return write_sum_of_tiles(memory, piece, *received, self.mean_over)

    @property
    def _place_bits(self) -> int:
        return (self.chunk**2 - 1).bit_length()


class _Plan(NamedTuple):
    """The message of a bucket: entries, tile by tile, and the means of each parameter's bins."""

    pieces: Sequence[TiledPiece]
    layout: Layout
    layout_of_means: Layout
    first_bins: Tensor
    """[entries]: the number of the first bin of each entry's parameter."""

    @property
    def entries(self) -> int:
        """The number of entries."""
        return self.layout.elements

    @classmethod
    def of(cls, bucket: BucketView, k: int, chunk: int) -> _Plan:
        """Return the plan for the parameters of a bucket that have elements."""
        slots, device = bucket.filled, bucket.memory.device
        is_one = are_formed_together(bucket)
        dtype = torch.int32 if bucket.memory.numel() < 1 << 31 else torch.int64
        found, offset, first = list[TiledParameter](), 0, 0
        for number, slot in enumerate(slots):
            tiling, elements = Tiling.of(slot.parameter, chunk), slot.gradient.numel()
            of_tile = min(k, tiling.a * tiling.b)
            starts = copied_to(device, tiling.starts(dtype).add_(offset))
            sides = copied_to(device, tiling.sides(dtype))
            memory, entries = slice(offset, offset + elements), slice(first, first + tiling.count * of_tile)
            found.append(TiledParameter(slot, number, tiling, of_tile, starts, sides, memory, entries))
            offset, first = offset + elements if is_one else 0, entries.stop
        together = [(bucket.tiles[0], found)] if is_one else [(one.slot.tile, [one]) for one in found]
        names = [slot.name for slot in slots]
        counts = [one.entries.stop - one.entries.start for one in found]
        first_bins = torch.from_numpy(numpy.repeat(numpy.arange(0, 4 * len(slots), 4, dtype=numpy.int32), counts))
        return cls(
            [_piece(*one) for one in together],
            Layout(tuple(names), tuple(counts)),
            Layout(tuple(names), (4,) * len(names)),
            copied_to(device, first_bins),
        )


def _piece(tile: Tile, parameters: Sequence[TiledParameter]) -> TiledPiece:
    shares = [one.k for one in parameters for _ in range(one.tiling.count)]
    return TiledPiece(
        tile, parameters, slice(parameters[0].entries.start, parameters[-1].entries.stop), runs_of(shares)
    )


class _TileMessages(NamedTuple):
    """All ranks' messages."""

    means: Tensor
    """[W, S, 4]: what each parameter's bins stand for, divided by W for a mean over all ranks."""
    places: PackedNumbers
    bins: PackedNumbers


class _Encoded(NamedTuple):
    """The message for one parameter."""

    means: Tensor
    """[4], not finite if an element is not."""
    places: Tensor
    """[T·k], in tiles."""
    bins: Tensor
    """[T·k], from 0 to 3."""
    indices: Tensor
    """[T·k], into the piece's memory; of padding, -1."""


def _encoded(parameter: TiledParameter, memory: Tensor) -> _Encoded:
    """Return the largest elements of each tile of one parameter in a piece's memory."""
    found = largest_of_tiles(parameter.tiling, memory[parameter.memory], parameter.k)
    places = found.to(parameter.starts.dtype).flatten()
    indices = parameter.indices(places)
    if parameter.tiling.is_padded:
        values = memory.index_select(0, indices.clamp(min=0)).masked_fill_(indices < 0, 0.0)
    else:
        values = memory.index_select(0, indices)
    bins, means = four_bins(values)
    return _Encoded(means, places, bins, indices)


def _to_the_median(means: Tensor, bins: Tensor) -> Tensor:
    """Return the factors [W, 1] that scale ranks' elements, given as means [W, 4] and bins [W, n], to the median norm.

    Squares are added up one bin after the other, so that ranks with different processors have the same sums.
    """
    largest = means.abs().amax().clamp(min=torch.finfo(means.dtype).tiny)
    of_bins = [(bins == number).sum(1) * (means[:, number] / largest).square() for number in range(4)]
    norms = root(of_bins[0] + of_bins[1] + of_bins[2] + of_bins[3])
    return (norms.median() / norms).nan_to_num(nan=1.0).clamp(max=1).unsqueeze(1)  # NaN: 0/0, nothing to scale
