"""E3M0: 4-bit floating-point numbers, a sign and an exponent, and one scale per block.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", 2025: the
format in which outer gradients are sent. The scale per block is our choice.
Idea: a block is divided by its largest magnitude over 16, the format's largest number, and rounded to the nearest of 0
and 1/4, 1/2, ..., 16. Exponent 0 is zero, as it is in formats with fractions: a block of zeros needs that.
Bytes: 1/2 per element and 4 per block. Contractive, biased: at most 1/9 of a block is lost, and 0.038 of a
normally distributed one. Both depend little on the size of blocks, so blocks are long.
Weakness: MXFP4 loses a third of that, for 1/32 byte per element more. Elements below 1/128 of a block's largest
magnitude become 0. There are no compiled passes: on a CPU a step takes 1.1 times as long as with MXFP4's eager ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.packing import in_units_of, pack_small_floats, scales_of, unpack_small_floats

_LARGEST = 16.0
_BIAS = 3
"""Exponent e, from 1 to 7, is the number 2**(e - 3)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class E3M0(Codec):
    """Signs and exponents, packed two to a byte, scaled by 1/16 of the largest magnitude of each block."""

    block: int = 1024

    multiple = 2

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the scales [B, 1], and bytes of two numbers each [B, block/2].

        Half of a fraction, added to fp32's bits, carries into the exponent from 1.5 times a power of two on. The
        exception is from 1/8 to 3/16, which is nearer to 1/4 than to 0.
        """
        scales = scales_of(blocks.abs().amax(1, keepdim=True), _LARGEST)
        values = in_units_of(scales, blocks).float()
        bits = values.view(torch.int32).bitwise_and(0x7FFFFFFF)
        least = (bits >> 23).sub_(127 - _BIAS - 1).clamp_(0, 1)  # 1 from 1/8 on
        exponents = bits.add_(1 << 22).bitwise_right_shift_(23).sub_(127 - _BIAS)
        return scales, pack_small_floats(exponents.maximum(least).clamp_(max=7), values)

    def decode_into(self, code: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """Write the numbers times the scales."""
        scales, packed = code
        return unpack_small_floats(packed, 3, blocks).mul_(scales)

    def relative_error(self) -> float:
        """Return the larger of (n - 1)/(16 + 9(n - 1)), below 1/9, and (n - 1)/(2**14 + n - 1), for n elements.

        The largest element, 1 in these units, is exact. For a relative error r, any other adds e² - r·x² to the error.
        Away from the numbers this grows up to the middle between two, so the worst block has n - 1 equal elements in
        such a middle x: 3/4, 3/8, ..., with e = x/3, of which the largest is the worst, or 1/128, with e = x.
        """
        others = self.block - 1
        return max(others / (16 + 9 * others), others / (2**14 + others))
