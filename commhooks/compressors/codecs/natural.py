"""Natural: elements rounded at random to powers of two.

Source: Horváth, Ho, Horváth, Sahu, Canini, Richtárik, "Natural Compression for Distributed Deep Learning", 2019 (MSML
2022), section 2.
Idea: a number between two powers of two is rounded to one of them at random, so that it is right on average; only sign
and exponent are sent. Exponents are relative to the block's largest, so that 7 bits hold them.
Bytes: 1 per element and 4 per block. Unbiased, with an expected loss of at most 1/8; error feedback gains little.
Weakness: a byte could hold more: int8 loses less if a block's magnitudes are similar. On a CPU, a step of eager passes
takes as long as 24 to 28 copies of the gradient; of compiled ones, 5 to 6.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.packing import in_units_of, widened
from commhooks.tensors import smallest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Natural(Codec):
    """A sign and an exponent in a byte, and for each block the first power of two that is not below it."""

    block: int = 1024

    compiled: ClassVar[tuple[str, int] | None] = "natural", 0
    draws = True  # rounding is stochastic
    is_unbiased = True

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the scales [B, 1], and bytes [B, block].

        Up to 1, fp32's exponent has 7 bits. Noise of 23 bits is added to the 23 fraction bits, and carries into the
        exponent with the fraction as its probability; below 2**-126, where the exponent is 0, the choice is
        between 0 and 2**-126. From 1 to 2, fp32 has the exponent 127, and the noise as its fraction bits.
        """
        largest = blocks.abs().amax(1, keepdim=True)
        fraction = torch.frexp(largest).mantissa
        # NaN if the largest is inf
        scales = (largest / fraction.masked_fill_(fraction <= 0.5, 1)).clamp_(min=smallest(blocks.dtype))
        bits = in_units_of(scales, blocks).float().view(torch.int32)
        exponents = bits.add_((noise + 1).view(torch.int32)).bitwise_right_shift_(23)
        exponents.sub_(exponents >> 8, alpha=128)  # the sign, two bits further up, becomes a byte's
        return scales, exponents.to(torch.int8).sub_(127)

    def decode_into(self, code: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """Write the powers of two times the scales: a bf16 number has one exponent bit more behind its sign."""
        scales, packed = code
        return blocks.copy_(widened(packed).view(torch.bfloat16)).mul_(scales)

    def relative_error(self) -> float:
        """Return 1/8: the error is largest for 4/3 times a power of two."""
        return 0.125
