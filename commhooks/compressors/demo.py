"""DeMo: the largest frequencies of each tile's momentum; with one bit for each, what DisTrO sends.

Source: Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024, algorithms 1 and 2; the one-bit messages
are those with which Nous Research trains (DisTrO).
Idea: each rank keeps its own momentum, which is never synchronised: the residual of `ErrorFeedback(decay=β)`. The k
largest coefficients of each tile's discrete cosine transform (DCT) are sent and subtracted from the momentum; the mean
is the inverse transform of all ranks' coefficients.
Bytes on the wire: 6·k for a tile of up to 64×64 elements: k values of 4 bytes and k indices of 2. With `one_bit`,
17/8·k, so 8.5 for k = 4, and 4 more per bucket, since bits cannot show an inf. A parameter is sent uncompressed if 6·k
bytes for each tile exceed its elements in fp32, such as a vector of fewer than 48 elements for k = 32.
Biased, ω ≤ 1 - k/4096. With `one_bit` or `sign` the mean consists of signs only, without magnitudes: so no gradient
scaler may unscale it. With `sign`, training diverges under SGD with momentum 0.9 and its usual learning rates: use SGD
without momentum, and about Adam's learning rate.
The authors' code (bloc97/DeMo) averages over the ranks that sent a coefficient, as `mean_over="senders"` does, and
always takes the mean's signs. It sends 32 coefficients for every 64 elements of a vector; here a vector is cut into
tiles of up to 64 rows of 64 elements, with 32 coefficients each. Its tiles' sides divide those of the matrix; here the
last tiles are padded.
Weakness: every rank receives all others' messages, so the bytes grow with the number of ranks. On a CPU a step takes
as long as 130 to 145 copies of the gradient: three transforms of every tile, and a selection in each.

Legend: T tiles of a×b elements; C their coefficients; k sent of each tile; W ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.compressors.dct import cosines, inverse_alike, shrinking, transform
from commhooks.compressors.kernels.sums import add_in_rank_order, runs_of
from commhooks.compressors.tiles import MeanOver, Tiling, senders
from commhooks.compressors.whole import average_whole
from commhooks.language import FEEDBACK_LAWS, BucketView, Compressor, Context, Exchange, Loss, Sends, Slot, Tile
from commhooks.language.compressor import side_by_side
from commhooks.language.requests import AllGather, Judge, Part
from commhooks.language.settings import refusal, setting
from commhooks.packing import pack_integers, unpack_integers


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeMo(Compressor):
    """A compressor that sends `k` coefficients of each tile: one collective per bucket, and one for small parameters.

    It has error feedback with a decay of 0.999, unless it is inside `WithoutFeedback`.
    """

    k: int = setting(32, least=1)
    """Lower: smaller messages, but more left in the momentum."""
    chunk: int = setting(64, least=2, most=128)
    """The longest side of a tile. Larger: smaller messages, but more left in the momentum."""
    one_bit: bool = False
    """True: only the signs of coefficients are sent, with equal weight. The full coefficients are subtracted from the
    momentum."""
    sign: bool = False
    """True: the mean is replaced by its signs, as in the paper's optimiser."""
    mean_over: MeanOver = "ranks"
    """"senders", as in the authors' code: a coefficient's sum is divided by the number of ranks that sent it, not of
    all ranks, so the mean is up to W times as long."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > self.chunk**2:
            raise refusal(self, "k", f"must be at most chunk² = {self.chunk**2}")

    sends = Sends.ANYTHING  # what is sent cannot be summed
    needs_equal_kernels = True  # each rank transforms the coefficients back, on a GPU by products of matrices

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return 1 - k/chunk², unless all of a tile's coefficients are sent.

        The coefficients sent have at least the average size, and the transform preserves norms.
        """
        if not parameter.numel():
            return None
        tiling = Tiling.of(parameter, self.chunk)
        return Loss(1 - self.k / self.chunk**2) if self.k < tiling.a * tiling.b else None

    @property
    def exempt(self) -> Mapping[str, str]:
        """Name the laws of error feedback, if the mean is not that of what was sent."""
        if self.one_bit or self.sign:
            return dict.fromkeys((*FEEDBACK_LAWS, "wire", "mean"), "signs are sent, or are the mean: no magnitudes")
        over_senders = dict.fromkeys(FEEDBACK_LAWS, "the mean is over those ranks that sent a coefficient")
        return over_senders if self.mean_over == "senders" else {}

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Gather every rank's coefficients; average parameters that are too small for them uncompressed."""
        places, rest = bucket.plan(self, lambda: self._plan(bucket))
        exchanges = [self._gather(bucket, places)] if places else []
        yield from side_by_side([*exchanges, average_whole(rest)] if rest else exchanges)
        for slot, _ in rest if self.sign else ():
            signs = slot.mean.sign()
            slot.mean.mul_(0).add_(signs)  # keeps NaN, and makes it of an inf, which its sign would hide

    def pays(self, parameter: Tensor) -> bool:
        """Return whether coefficients and their places take no more bytes than the parameter would in fp32.

        With `one_bit` it does not matter: the mean must consist of signs.
        """
        tiling = Tiling.of(parameter, self.chunk)
        sent = tiling.count * min(self.k, tiling.a * tiling.b)
        return self.one_bit or sent * (4 + 2) <= 4 * parameter.numel()

    def _plan(self, bucket: BucketView) -> tuple[list[_Transformed], list[tuple[Slot, Tile]]]:
        """Return the places of parameters to transform, and the slots to average uncompressed."""
        slots = bucket.filled
        places = [self._place(slot) for slot in slots if self.pays(slot.parameter)]
        return places, [(slot, slot.tile) for slot in slots if not self.pays(slot.parameter)]

    def _gather(self, bucket: BucketView, places: list[_Transformed]) -> Exchange:
        """Gather every rank's coefficients; the mean is the inverse transform of their sum, in rank order."""
        own = [self._largest(place.coefficients()) for place in places]
        parts = []
        for place, (values, at) in zip(places, own, strict=True):
            parts += [place.slot.part(pack_integers(values < 0, 1) if self.one_bit else values), place.slot.part(at)]
        if self.one_bit:
            largest = torch.stack([values.abs().amax() for values, _ in own]).amax()
            parts.append(Part(largest.reshape(1), bucket.layout))
        answers = yield AllGather(*parts, last=True)

        received = [
            (self._values(sent, values, place), at)
            for place, sent, at, (values, _) in zip(places, answers[::2], answers[1::2], own, strict=False)
        ]  # not strict: the verdict's comes last
        to_judge = answers[::2]  # values; or bits, which are always finite, and the largest element
        if not self.sign:
            means = (place.mean(*of_ranks, self.mean_over) for place, of_ranks in zip(places, received, strict=True))
            to_judge += places[0].slot.tile.in_own_range(means)
        finite = yield Judge(*to_judge)
        for place, (values, at), of_ranks in zip(places, own, received, strict=True):
            place.slot.keep(place.slot.form().sub_(place.extracted(values, at)), finite)
            mean = place.mean(*of_ranks, self.mean_over)
            # Signs cannot show an inf, so the verdict does.
            place.slot.write((mean.sign_() if self.sign else mean).add_(torch.where(finite, 0.0, torch.nan)))

    def _place(self, slot: Slot) -> _Transformed:
        tiling = Tiling.of(slot.parameter, self.chunk)
        left, right = (cosines(side, slot.room) for side in (tiling.a, tiling.b))
        a, b = shrinking(tiling.a), shrinking(tiling.b)
        return _Transformed(slot, tiling, (left * a, right * b), (left / a, right / b))

    def _largest(self, C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest coefficients [T, k] of C [T, ab] and their places; zeros come last: they have no sign."""
        at = torch.topk(C.abs(), min(self.k, C.shape[1]), sorted=False).indices
        values = C.gather(1, at)
        return values, at.masked_fill(values == 0, C.shape[1]).to(torch.int16)

    def _values(self, sent: Tensor, like: Tensor, place: _Transformed) -> Tensor:
        """Return all ranks' coefficients [W, T, k]; bits stand for coefficients of 1 and -1."""
        if not self.one_bit:
            return sent
        return (1 - 2 * unpack_integers(sent, 1, tuple(like.shape)).to(like.dtype)) * place.shrunk


class _Transformed(NamedTuple):
    """A parameter's place in a bucket, its tiles, and the bases of their two sides, times powers of two."""

    slot: Slot
    tiling: Tiling
    forward: tuple[Tensor, Tensor]
    inverse: tuple[Tensor, Tensor]
    """Each undoes the shrinking of its own side: so nothing overflows between the two sides."""

    @property
    def shrunk(self) -> float:
        """The power of two by which coefficients are multiplied, so that the largest gradients have finite ones."""
        return shrinking(self.tiling.a) * shrinking(self.tiling.b)

    def coefficients(self) -> Tensor:
        """Return the transform [T, ab] of gradient + momentum, times `shrunk`."""
        return transform(self.tiling.cut(self.slot.form()), *self.forward).flatten(1)

    def extracted(self, values: Tensor, places: Tensor) -> Tensor:
        """Return what this rank's coefficients [T, k] represent, 1-D."""
        C = self._sum(values.unsqueeze(0), places.unsqueeze(0), "ranks")
        left, right = self.inverse
        return self.tiling.join(transform(C, left.t(), right.t()))

    def mean(self, values: Tensor, places: Tensor, over: MeanOver) -> Tensor:
        """Return the mean that the ranks' coefficients [W, T, k] represent, 1-D, the same on every processor."""
        C = self._sum(values, places, over)
        return self.tiling.join(inverse_alike(C, *self.inverse))

    def _sum(self, values: Tensor, places: Tensor, over: MeanOver) -> Tensor:
        """Return the mean coefficients [T, a, b], added up in rank order."""
        a, b, T = self.tiling.a, self.tiling.b, self.tiling.count
        C = values.new_zeros(T, a * b + 1)  # the last column takes zeros
        runs = runs_of([places.shape[2]] * T)
        starts = torch.arange(0, C.numel(), a * b + 1, dtype=torch.int64, device=C.device).unsqueeze(1)
        values, places = values.flatten(1), (places + starts).flatten(1)
        values = values / (len(values) if over == "ranks" else senders(values, places, C.numel()))
        add_in_rank_order(C.view(-1), places, values, runs)
        return C[:, :-1].reshape(-1, a, b)
