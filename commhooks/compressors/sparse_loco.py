"""SparseLoCo: the largest elements of each tile, with two bits for each value and twelve for its index.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, algorithm 1, which exchanges the
pseudo-gradients of H local steps this way; nothing here depends on what the gradients are.
Idea: each tile of 64×64 elements sends its 64 largest. A parameter's sent elements fall into four bins, by sign and by
magnitude (above the mean magnitude or not); an element is sent as the number of its bin, and decoded as the bin's mean.
The authors' code (tplr-ai/templar) averages over the ranks that sent an element, and clips each rank's message to the
median norm: `mean_over="senders"` and `clip_to_median=True`.
Bytes on the wire: 64·12/8 + 64·2/8 = 112 for a tile of 4,096 elements, and four means of 4 bytes for each parameter.
The places of a bucket are sent in two runs, of their lowest 8 bits and of the other 4 (bits.py), and then the bins.
Biased: the residual fades, by a factor of 0.95 per step in the paper, and the faded part is never sent. ω for n
elements is at most 1 - 1/(4n), if magnitudes differ most; for normally distributed ones it is slightly above top-k's.
Weakness: every rank receives all others' messages, so the bytes grow with the number of ranks. On a CPU a step takes as
long as 14 to 19 copies of the gradient, or 6 to 9 compiled, most of it for the selection in every tile.

Legend: T tiles of a×b elements; k sent of each tile; W ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from commhooks.compressors.bits import pack, unpack
from commhooks.compressors.sparse.gathering import Received, are_formed_together, runs_of
from commhooks.compressors.tiles import MeanOver, Tiling, senders, without_padding
from commhooks.devices import copied_to
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import FEEDBACK_LAWS, Compressor, Context, Exchange
from commhooks.language.loss import Loss, Sends
from commhooks.language.requests import AllGather, Judge, Layout, Part
from commhooks.language.settings import refusal, setting
from commhooks.language.tile import Tile
from commhooks.native.largest import MOST, Grid, Packed, Selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseLoCo(Compressor):
    """A compressor that sends `k` elements of each tile: one collective per bucket.

    Wrap it in `ErrorFeedback(decay=0.95)`.
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

    @property
    def needs_equal_kernels(self) -> bool:
        """True if norms are compared: roots differ in the last bits."""
        return self.clip_to_median

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
        own = [_encoded(member, piece.tile.form()) for piece in plan.pieces for member in piece.members]
        means, places, bins = (torch.cat(parts) for parts in zip(*((one[:3]) for one in own), strict=True))
        codes = pack(places, self._place_bits), pack(bins, 2)
        parts = [Part(means, plan.layout_of_means), *(Part(code, plan.layout) for code in codes)]
        answers = yield AllGather(*parts, last=True)

        received = self._decoded(plan, answers)
        sums = (of_all.overwrite(piece.tile.room) for piece, of_all in zip(plan.pieces, received, strict=True))
        finite = yield Judge(answers[0], *plan.pieces[0].tile.in_own_range(sums))
        values = means.index_select(0, plan.first_bins + bins)
        indices = torch.cat([one.indices for one in own])
        if plan.is_padded:
            values, indices = without_padding(values, indices)
        for piece, of_all in zip(plan.pieces, received, strict=True):
            M = piece.tile.form()
            M.index_add_(0, indices[piece.entries], values[piece.entries], alpha=-1)
            piece.tile.keep(M, finite)
            piece.tile.write(of_all.overwrite(piece.tile.room))

    def _decoded(self, plan: _Plan, answers: Sequence[Tensor]) -> Sequence[Received | _Codes]:
        """Decode the ranks' means [W, 4S], packed places and packed bins."""
        W, entries = len(answers[0]), plan.layout.elements
        means = answers[0].view(W, -1, 4)
        selection = Selection.chosen(means) if plan.is_small else None
        if self.clip_to_median:
            bins = unpack(answers[2], 2, (entries,))
            factors = [
                _to_the_median(means[:, number], bins[:, member.entries]) for number, member in enumerate(plan.members)
            ]
            means = means * torch.stack(factors, dim=1)
        if self.mean_over == "ranks":
            means = means / W
            if selection is not None:
                codes = Packed(answers[1], self._place_bits, entries, 0), Packed(answers[2], 2, entries, 0)
                return [_Codes(selection, piece, means, *codes) for piece in plan.pieces]
        places, bins = unpack(answers[1], self._place_bits, (entries,)), unpack(answers[2], 2, (entries,))
        values = means.flatten(1).gather(1, bins.add_(plan.first_bins).long())
        received = []
        for piece in plan.pieces:
            indices = torch.cat([member.indices(places[:, member.entries]) for member in piece.members], dim=1)
            own = values[:, piece.entries]
            if plan.is_padded:
                own, indices = without_padding(own, indices)
            if self.mean_over == "senders":
                own = own / senders(own, indices, piece.tile.gradient.numel())
            received.append(Received([(indices, own, piece.runs)], []))
        return received

    @property
    def _place_bits(self) -> int:
        return (self.chunk**2 - 1).bit_length()


class _Member(NamedTuple):
    """A parameter, its tiles, and its place in its piece and in the message."""

    slot: Slot
    number: int
    """Its index among the bucket's."""
    tiling: Tiling
    k: int
    """The number of elements sent of each tile."""
    starts: Tensor
    """[T, 1]: the index of each tile's first element in the piece's memory."""
    sides: Tensor
    """[2, T, 1]: the numbers of rows and columns of each tile that are no padding."""
    place: slice
    entries: slice

    def indices(self, places: Tensor) -> Tensor:
        """Return the indices into the piece's memory of places [..., T·k] in tiles; of padding, -1."""
        return self.tiling.indices(places.unflatten(-1, (-1, self.k)), self.starts, self.sides).flatten(-2)

    @property
    def grid(self) -> Grid:
        """The same for compiled code."""
        return self.tiling.sending(self.k)


@dataclasses.dataclass(frozen=True, eq=False)
class _Piece:
    """A tile of memory with some parameters."""

    tile: Tile
    members: Sequence[_Member]
    entries: slice

    @functools.cached_property
    def runs(self) -> Sequence[int]:
        """`runs_of` its entries, tile by tile."""
        return runs_of(share for member in self.members for share in [member.k] * member.tiling.count)


class _Plan(NamedTuple):
    """The message of a bucket: entries, tile by tile, and the means of each parameter's bins."""

    pieces: Sequence[_Piece]
    members: Sequence[_Member]
    layout: Layout
    layout_of_means: Layout
    first_bins: Tensor
    """[entries]: the number of the first bin of each entry's parameter."""
    is_padded: bool
    is_small: bool
    """True if compiled code can process its tiles."""

    @classmethod
    def of(cls, bucket: BucketView, k: int, chunk: int) -> _Plan:
        """Return the plan for the parameters of a bucket that have elements."""
        slots, device = bucket.filled, bucket.memory.device
        is_one = are_formed_together(bucket)
        dtype = torch.int32 if bucket.memory.numel() < 1 << 31 else torch.int64
        members, offset, first = list[_Member](), 0, 0
        for slot in slots:
            tiling, elements = Tiling.of(slot.parameter, chunk), slot.gradient.numel()
            of_tile = min(k, tiling.a * tiling.b)
            starts = copied_to(device, tiling.starts(dtype).add_(offset))
            end = first + tiling.count * of_tile
            place = slice(offset, offset + elements)
            sides = copied_to(device, tiling.sides(dtype))
            members.append(_Member(slot, len(members), tiling, of_tile, starts, sides, place, slice(first, end)))
            offset, first = offset + elements if is_one else 0, end
        pieces = [_Piece(member.slot.tile, [member], member.entries) for member in members]
        if is_one:
            pieces = [_Piece(bucket.tiles[0], members, slice(0, first))]
        names = [slot.name for slot in slots]
        counts = [member.entries.stop - member.entries.start for member in members]
        first_bins = torch.from_numpy(numpy.repeat(numpy.arange(0, 4 * len(slots), 4, dtype=numpy.int32), counts))
        return cls(
            pieces,
            members,
            Layout(tuple(names), tuple(counts)),
            Layout(tuple(names), (4,) * len(names)),
            copied_to(device, first_bins),
            any(member.tiling.is_padded for member in members),
            all(member.tiling.a * member.tiling.b <= MOST for member in members),
        )


class _Codes(NamedTuple):
    """All ranks' messages for one piece, which compiled code decodes and adds up."""

    selection: Selection
    piece: _Piece
    means: Tensor
    """[W, S, 4], divided by W."""
    places: Packed
    bins: Packed

    def overwrite(self, memory: Tensor) -> Tensor:
        """Overwrite 1-D memory of the tile's size with the mean, added up in rank order, and return it."""
        for member in self.piece.members:
            places, bins = (packed._replace(first=member.entries.start) for packed in (self.places, self.bins))
            means = self.means[:, member.number]
            self.selection.sum_of_tiles(member.grid, memory[member.place], places, bins, means)
        return memory


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


def _encoded(member: _Member, memory: Tensor) -> _Encoded:
    """Return the largest elements of each tile of one parameter in a piece's memory."""
    places = member.tiling.largest(memory[member.place], member.k).to(member.starts.dtype).flatten()
    indices = member.indices(places)
    if member.tiling.is_padded:
        values = memory.index_select(0, indices.clamp(min=0)).masked_fill_(indices < 0, 0.0)
    else:
        values = memory.index_select(0, indices)
    selection = Selection.chosen(values)
    if selection is not None:
        bins, means = selection.bins(values)
        return _Encoded(means, places, bins, indices)
    shrunk = torch.where(values.abs().amax() > 2**60, 2.0**-60, 1.0)  # no sum of values overflows
    values = values * shrunk
    bins = 2 * (values < 0).int() + (values.abs() > values.abs().mean())
    members = bins == torch.arange(4, dtype=torch.int64, device=bins.device).unsqueeze(1)  # 4×Tk
    means = torch.where(members, values, 0.0).sum(1) / members.sum(1).clamp_(min=1)
    return _Encoded(means / shrunk, places, bins, indices)


def _to_the_median(means: Tensor, bins: Tensor) -> Tensor:
    """Return the factors [W, 1] that scale ranks' elements, given as means [W, 4] and bins [W, n], to the median norm.

    Squares are added up one bin after the other, so that ranks with different processors have the same sums. Their
    roots may differ in the last bit: see `needs_equal_kernels`.
    """
    largest = means.abs().amax().clamp(min=torch.finfo(means.dtype).tiny)
    of_bins = [(bins == number).sum(1) * (means[:, number] / largest).square() for number in range(4)]
    norms = (of_bins[0] + of_bins[1] + of_bins[2] + of_bins[3]).sqrt()
    return (norms.median() / norms).nan_to_num(nan=1.0).clamp(max=1).unsqueeze(1)  # NaN: 0/0, nothing to scale
