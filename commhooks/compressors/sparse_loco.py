"""SparseLoCo: the largest elements of each tile, with two bits for each value and twelve for its index.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, algorithm 1, which exchanges the
pseudo-gradients of H local steps this way; nothing here depends on what the gradients are.
Idea: each tile of 64×64 elements sends its 64 largest. A parameter's sent elements fall into four bins, by sign and by
magnitude (above the mean magnitude or not); an element is sent as the number of its bin, and decoded as the bin's mean.
The authors' code (tplr-ai/templar) averages over the ranks that sent an element, and clips what a rank has sent to the
median norm: `mean_over="senders"` and `clip_to_median=True`.
Bytes on the wire: 64·12/8 + 64·2/8 = 112 for a tile of 4,096 elements, and four means of 4 bytes for each parameter.
Biased: the residual fades, by a factor of 0.95 per step in the paper, and what has faded is never sent. ω for n
elements is at most 1 - 1/(4n), if magnitudes differ most; for normally distributed ones it is slightly above that of
top-k.
Weakness: every rank receives what all others send, so the bytes grow with the number of ranks. On a CPU a step takes as
long as more than 40 copies of the gradient: a selection in every tile, and packing 14 bits at a time.

Legend: T tiles of a×b elements; k sent of each tile; W ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.compressors.bits import pack, unpack
from commhooks.compressors.tiles import MeanOver, Tiling, senders
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Compressor, Context, Exchange
from commhooks.language.loss import Loss, Sends
from commhooks.language.requests import AllGather, Judge
from commhooks.language.settings import refusal, setting


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
    """"senders", as in the authors' code: an element's sum is divided by the number of ranks that sent it, not by that
    of all ranks, so the mean is up to W times as long."""
    clip_to_median: bool = False
    """On: what a rank has sent of a parameter is scaled down to the median of all ranks' norms if it is longer; of two
    norms in the middle, the lower one counts. What is cut off is lost."""

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

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Gather every rank's codes; the mean is the sum of the decoded values, in rank order."""
        slots = bucket.filled
        if not slots:
            return
        tilings = bucket.plan(self, lambda: [Tiling.of(slot.parameter, self.chunk) for slot in slots])
        own = [self._encode(tiling.cut(slot.form())) for slot, tiling in zip(slots, tilings, strict=True)]
        parts = []
        for slot, (means, at, bins) in zip(slots, own, strict=True):
            parts += [slot.part(means), slot.part(pack(at, self._place_bits)), slot.part(pack(bins, 2))]
        answers = yield AllGather(*parts, last=True)

        received = list(zip(answers[::3], answers[1::3], answers[2::3], strict=True))
        means_of_slots = (self._mean(*pair) for pair in zip(tilings, received, strict=True))
        finite = yield Judge(*answers[::3], *slots[0].tile.in_own_range(means_of_slots))
        for slot, tiling, (means, at, bins), of_ranks in zip(slots, tilings, own, received, strict=True):
            M = slot.form()
            sent = M.new_zeros(tiling.count, tiling.a * tiling.b).scatter_(1, at, means[bins])
            slot.keep(M.sub_(tiling.join(sent)), finite)
            slot.write(self._mean(tiling, of_ranks))

    def _encode(self, tiles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the bins' means [4], and the indices and bins [T, k] of the elements sent of tiles [T, a, b].

        The means are not finite if an element is not.
        """
        flat = tiles.flatten(1)  # T×ab
        at = torch.topk(flat.abs(), min(self.k, flat.shape[1]), sorted=False).indices
        values = flat.gather(1, at)  # T×k
        shrunk = torch.where(values.abs().amax() > 2**60, 2.0**-60, 1.0)  # no sum of values overflows
        values = values * shrunk
        bins = 2 * (values < 0).int() + (values.abs() > values.abs().mean())
        members = bins.flatten() == torch.arange(4, device=bins.device).unsqueeze(1)  # 4×Tk
        means = torch.where(members, values.flatten(), 0.0).sum(1) / members.sum(1).clamp_(min=1)
        return means / shrunk, at, bins

    def _mean(self, tiling: Tiling, of_ranks: Sequence[Tensor]) -> Tensor:
        """Return the mean of what the ranks' means, packed indices and packed bins represent, in rank order, 1-D."""
        T, elements = tiling.count, tiling.a * tiling.b
        shape = T, min(self.k, elements)
        means = of_ranks[0]
        places, bins = unpack(of_ranks[1], self._place_bits, shape), unpack(of_ranks[2], 2, shape).flatten(1)
        if self.clip_to_median:
            means = means * _to_the_median(means, bins)
        if self.mean_over == "ranks":
            means = means / len(means)
        values = means.gather(1, bins).view(-1, *shape)
        if self.mean_over == "senders":
            values = values / senders(values, places, elements)
        total = means.new_zeros(T, elements)
        for own, at in zip(values, places, strict=True):
            total.scatter_add_(1, at, own)
        return tiling.join(total)

    @property
    def _place_bits(self) -> int:
        return (self.chunk**2 - 1).bit_length()


def _to_the_median(means: Tensor, bins: Tensor) -> Tensor:
    """Return the factors [W, 1] that scale what ranks have sent, as means [W, 4] and bins [W, n], to the median norm.

    Squares are added up one bin after the other, so that ranks with different processors have the same bits.
    """
    largest = means.abs().amax().clamp(min=torch.finfo(means.dtype).tiny)
    of_bins = [(bins == number).sum(1) * (means[:, number] / largest).square() for number in range(4)]
    norms = (of_bins[0] + of_bins[1] + of_bins[2] + of_bins[3]).sqrt()
    return (norms.median() / norms).nan_to_num(nan=1.0).clamp(max=1).unsqueeze(1)  # NaN: 0/0, nothing to scale
