"""Int4: whole numbers from -7 to 7, and one scale a block.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, with 4 bits as Markov et al., "CGX",
Middleware 2022, send gradients.
Idea: a block is divided by a seventh of its largest magnitude, and rounded to the nearest whole number.
Bytes: 1/2 an element and 4 a block. Contractive: small blocks lose less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.errors import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(Codec):
    """Numbers of 4 bits, packed two to a byte, and a seventh of the largest magnitude of each block."""

    block: int = 64

    def __post_init__(self) -> None:
        if not 2 <= self.block <= 128 or self.block % 2:
            raise SettingsError(f"Int4(block={self.block!r}): block must be even, and from 2 to 128.")

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the scales [B, 1], and bytes of two numbers each [B, block/2]."""
        scales = blocks.abs().amax(1, keepdim=True) / 7
        numbers = (blocks / scales).nan_to_num_(0.0).clamp_(-7, 7).round_().add_(8).to(torch.uint8)
        return scales, numbers[:, : self.block // 2] | numbers[:, self.block // 2 :] << 4

    def decode(self, code: Sequence[Tensor]) -> Tensor:
        """Return the numbers times the scales."""
        scales, packed = code
        return torch.cat([packed & 15, packed >> 4], dim=1).to(scales.dtype).sub_(8).mul_(scales)

    def relative_error(self) -> float:
        """Return (block - 1)/196: the largest element is exact, and the others are off by half a step at most."""
        return (self.block - 1) / 196
