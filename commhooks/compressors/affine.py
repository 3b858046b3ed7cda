"""Affine: 8 bits an element, between the least and the largest of a bucket or of each of its channels.

Source: PyTorch's quantization_pertensor_hook and quantization_perchannel_hook, whose codes these are.
Idea: the range of a channel, widened to hold 0, is cut into 255 steps; every rank gathers all ranks' codes, and
averages what they stand for. Nothing is padded: a last channel may be short, and has a scale of its own.
Bytes on the wire: 1 an element, and 8 a channel (a scale and the number that stands for 0), from every rank to every
other. Biased, ω at most c/(c + 65,024) for a channel of c elements. Weakness: the bytes received grow with the number
of ranks, and one large element takes the digits of all in its channel; "int8" has neither (two hops, small blocks).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.language.bucket import BucketView, Tile
from commhooks.language.compressor import Compressor, Context, Exchange
from commhooks.language.requests import AllGather, Judge, Part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Affine(Compressor):
    """Average the 8-bit codes that every rank gathers: one collective a bucket."""

    channel: int | None = None
    """Elements that share a scale. Smaller: more scales, fewer digits lost. None: all of a bucket share one."""

    def __post_init__(self) -> None:
        if self.channel is not None and self.channel < 1:
            raise SettingsError(f"Affine(channel={self.channel!r}): channel must be at least 1, or None.")

    @property
    def only_sums(self) -> bool:
        """Return False: codes cannot be summed."""
        return False

    def loses(self, name: str, parameter: Tensor) -> bool:
        """Return True: elements are rounded."""
        return True

    def relative_error(self, elements: int) -> float:
        """Return c/(c + 65,024): the largest is at least 127.5 steps, and off by at most half of one.

        So are the c - 1 others, but none by more than it is itself, for 0 is exact: at worst they are half a step each,
        and lost.
        """
        channel = min(elements, self.channel or elements)
        return channel / (channel + 255**2 - 1)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Gather scales, zero points and codes; the mean is that of what they stand for, in rank order."""
        tiles = [tile for tile in bucket.tiles if tile.gradient.numel()]
        if not tiles:
            return
        codes = [self._encode(tile.form()) for tile in tiles]
        parts = [Part(one, tile.layout) for tile, code in zip(tiles, codes, strict=True) for one in code]
        answers = yield AllGather(*parts, last=True)
        received = list(zip(answers[::2], answers[1::2], strict=True))
        finite = yield Judge(*answers[::2], *self._largest(tiles, received, context))
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
        scale = ((high - low) / 255).clamp_(min=torch.finfo(low.dtype).tiny)
        zero = (-(low / scale).round()).clamp_(0, 255)
        scales = torch.stack([scale, zero])
        codes = (M / self._spread(scale, M.numel())).round_().add_(self._spread(zero, M.numel()))
        return scales, codes.nan_to_num_(0.0).clamp_(0, 255).to(torch.uint8)

    def _decode(self, scales: Tensor, codes: Tensor) -> Tensor:
        scale, zero = (self._spread(one, codes.numel()) for one in scales)
        return codes.to(scales.dtype).sub_(zero).mul_(scale)

    def _spread(self, of_channels: Tensor, elements: int) -> Tensor:
        """Return each element's own, of one for each channel."""
        if len(of_channels) == 1:
            return of_channels
        return of_channels.repeat_interleave(self.channel or elements)[:elements]

    def _mean(self, scales: Tensor, codes: Tensor, context: Context) -> Tensor:
        mean = self._decode(scales[0], codes[0])
        for rank in range(1, context.world_size):
            mean += self._decode(scales[rank], codes[rank])
        return mean.div_(context.world_size)

    def _largest(self, tiles: list[Tile], received: list[tuple[Tensor, Tensor]], context: Context) -> list[Tensor]:
        """Return the largest means in the gradients' dtype, if that may not hold them."""
        pairs = zip(tiles, received, strict=True) if tiles[0].has_short_range else ()
        return [self._mean(*of_all, context).abs().amax().to(tile.gradient.dtype) for tile, of_all in pairs]
