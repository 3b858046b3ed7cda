"""Affine: 8 bits per element, between the smallest and the largest value of a bucket or of each of its channels.

Source: PyTorch's quantization_pertensor_hook and quantization_perchannel_hook, whose codes these are.
Idea: the range of a channel, widened to include 0, is divided into 255 steps; every rank gathers the codes of all
ranks, decodes them and averages. Nothing is padded: the last channel may be short, and has its own scale.
Bytes on the wire: 1 per element, and 8 per channel (a scale and the zero point), from every rank to every other.
Biased, ω at most c/(c + 65,024) for a channel of c elements. Weakness: the bytes received grow with the number of
ranks, and one large element costs all others in its channel their precision; "int8" has neither problem (two hops,
small blocks).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from commhooks.language import AllGather, BucketView, Compressor, Context, Exchange, Judge, Loss, Part, Sends, setting
from commhooks.tensors import power_below, smallest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Affine(Compressor):
    """A compressor that gathers 8-bit codes from every rank and averages them: one collective per bucket."""

    channel: int | None = setting(None, least=1)
    """Elements that share a scale. Smaller: more scales, less rounding. None: the whole bucket shares one."""

    sends = Sends.ANYTHING  # codes cannot be summed

    def loss(self, name: str, parameter: Tensor) -> Loss:
        """Return c/(c + 65,024): the largest element is at least 127.5 steps, and its error at most half a step.

        The other c - 1 elements also have errors of at most half a step, but none larger than the element itself, since
        0 is exact: in the worst case each is half a step and is lost.
        """
        channel = min(parameter.numel(), self.channel or parameter.numel())
        return Loss(channel / (channel + 255**2 - 1))

    @property
    def exempt(self) -> Mapping[str, str]:
        """Name the law of buckets."""
        return {"buckets": "elements of several parameters share a scale"}

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Gather scales, zero points and codes; average the decoded values in rank order."""
        tiles = [tile for tile in bucket.tiles if tile.gradient.numel()]
        if not tiles:
            return
        codes = [self._encode(tile.form()) for tile in tiles]
        parts = [Part(one, tile.layout) for tile, code in zip(tiles, codes, strict=True) for one in code]
        answers = yield AllGather(*parts, last=True)
        received = list(zip(answers[::2], answers[1::2], strict=True))
        means = (self._mean(*of_all, context) for of_all in received)
        finite = yield Judge(*answers[::2], *tiles[0].in_own_range(means))
        for tile, own, of_all in zip(tiles, codes, received, strict=True):
            if tile.keeps:
                tile.keep(tile.form().sub_(self._decode(*own)), finite)
            tile.write(tile.room.copy_(self._mean(*of_all, context)))

    def _encode(self, M: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales and zero points [2, channels], and codes [n]."""
        size = self.channel or M.numel()
        whole = M.numel() // size * size
        pieces = [M[:whole].view(-1, size)] + ([M[whole:].view(1, -1)] if whole < M.numel() else [])
        low = torch.cat([piece.amin(1) for piece in pieces]).clamp_(max=0)
        high = torch.cat([piece.amax(1) for piece in pieces]).clamp_(min=0)
        scale = ((high - low) / 255).clamp_(min=smallest(low.dtype))
        zero = (-(low / scale).round()).clamp_(0, 255)
        scales = torch.stack([scale, zero])
        codes = (M / self._spread(scale, M.numel())).round_().add_(self._spread(zero, M.numel()))
        return scales, codes.nan_to_num_(0.0).clamp_(0, 255).to(torch.uint8)

    def _decode(self, scales: Tensor, codes: Tensor) -> Tensor:
        scale, zero = (self._spread(one, codes.numel()) for one in scales)
        return codes.to(scales.dtype).sub_(zero).mul_(scale)

    def _spread(self, of_channels: Tensor, elements: int) -> Tensor:
        """Expand one value per channel to one value per element."""
        if len(of_channels) == 1:
            return of_channels
        return of_channels.repeat_interleave(self.channel or elements)[:elements]

    def _mean(self, scales: Tensor, codes: Tensor, context: Context) -> Tensor:
        shrunk = torch.where(scales[:, 0].amax() > 1, power_below(context.world_size), 1.0)
        scales = torch.stack([scales[:, 0] * shrunk, scales[:, 1]], 1)
        mean = self._decode(scales[0], codes[0])
        for rank in range(1, context.world_size):
            mean += self._decode(scales[rank], codes[rank])
        return mean.div_(shrunk * context.world_size)
