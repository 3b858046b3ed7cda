"""Sign: one bit per element, and one scale per block.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, section 4; blockwise as in Zheng, Huang, Kwok,
"Communication-Efficient Distributed Blockwise Momentum SGD", NeurIPS 2019. With error feedback on both hops this is
what Tang et al., "1-bit Adam", ICML 2021, send.
Idea: a block becomes its signs times the mean of its magnitudes, the scale that minimises the error.
Bytes: 1/8 per element and 4 per block. Contractive: it loses at most 1 - 1/n of a block of n elements, and 1 - 2/π of a
normally distributed one; the more similar a block's magnitudes, the less. Biased.
Weakness: it may not converge without error feedback, and even with it, a block of very different magnitudes takes long.
On a CPU, a step of eager passes takes as long as 19 to 26 copies of the gradient; of compiled ones, 4 to 6.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.language.memory import surely
from commhooks.packing import pack_signs, unpack_signs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sign(Codec):
    """Signs, packed eight to a byte, and the mean magnitude of each block."""

    block: int = 1024

    multiple = 8
    compiled: ClassVar[tuple[str, int] | None] = "sign", 0

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the scales [B, 1], and bytes of 8 signs each [B, block/8]."""
        magnitudes = blocks.abs()
        scales = magnitudes.mean(1, keepdim=True)
        if not surely(scales.isfinite()):  # the sum of finite magnitudes may be inf, but not the sum of their shares
            shares = magnitudes.new_full((self.block, 1), 1 / self.block)
            scales = torch.where(scales.isfinite(), scales, magnitudes @ shares)
        return scales, pack_signs(blocks.float())

    def decode_into(self, code: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """Write the signs times the scales."""
        scales, packed = code
        return unpack_signs(packed, scales, blocks)

    def relative_error(self) -> float:
        """Return 1 - 1/block: the worst case is a block with a single nonzero element."""
        return 1 - 1 / self.block
