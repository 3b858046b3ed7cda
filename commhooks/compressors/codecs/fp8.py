"""FP8: floating-point numbers of 8 bits, and one scale a block.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (E4M3: 4 bits of exponent, 3 of fraction, no inf),
with a scale a block as Peng et al., "FP8-LM", 2023, have one a tensor.
Idea: a block is divided by its largest magnitude over 448, E4M3's largest number, and cast.
Bytes: 1 an element and 4 a block. Contractive: it loses at most 1/256, and 1/1500 of normal blocks. Biased, but little.
Weakness: int8 has more digits for a block's large elements; FP8 has them for the small ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.compressors.codecs.packing import look_up

LARGEST = 448.0
"""Of E4M3."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8(Codec):
    """E4M3 numbers as bytes, and a 448th of the largest magnitude of each block."""

    block: int = 128

    def __post_init__(self) -> None:
        self.check_block()

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the scales [B, 1], and bytes [B, block]."""
        scales = blocks.abs().amax(1, keepdim=True) / LARGEST
        return scales, to_e4m3((blocks / scales).nan_to_num_(0.0))  # NaN: a block of zeros

    def decode(self, code: Sequence[Tensor]) -> Tensor:
        """Return the numbers times the scales."""
        scales, packed = code
        return from_e4m3(packed).to(scales.dtype).mul_(scales)

    def relative_error(self) -> float:
        """Return 2**-8, the square of the unit roundoff, and what numbers below 2**-6 lose: each at most 2**-10."""
        return 2.0**-8 + self.block * (2.0**-10 / LARGEST) ** 2


def to_e4m3(values: Tensor) -> Tensor:
    """Return the nearest E4M3 numbers as bytes; what is larger than all becomes the largest."""
    return values.float().clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(packed: Tensor) -> Tensor:
    """Return the numbers [B, n] in fp32: from a table, four times as fast as PyTorch's cast on a processor."""
    every = torch.arange(256, device=packed.device).to(torch.uint8)
    return look_up(packed, every.view(torch.float8_e4m3fn).float())
