"""Uniform: integers from -levels to levels, and one scale per block; shared by int8, int4, QSGD and TernGrad.

Legend: n elements x of a block, s levels, scale c; x/c is rounded up with the probability of its fraction, else down.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.packing import in_units_of, pack_blocks, scales_of, unpack_blocks_into


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform(Codec):
    """Blocks divided by their scales, rounded to integers, and packed in as few bits as these need."""

    @property
    def multiple(self) -> int:
        """The number of elements that fill a byte."""
        return 8 // self.bits

    @property
    @abstractmethod
    def levels(self) -> int:
        """The largest integer, at most 127."""

    @property
    def bits(self) -> int:
        """Bits per number: 2, 4 or 8."""
        return next(bits for bits in (2, 4, 8) if 2 * self.levels < 2**bits)

    @property
    def compiled(self) -> tuple[str, int] | None:
        """Its compiled passes."""
        return "uniform", self.levels

    @property
    def is_unbiased(self) -> bool:
        """True if rounding is stochastic."""
        return self.draws

    def scales(self, blocks: Tensor) -> Tensor:
        """Return c [B, 1], such that no |x/c| exceeds s: the largest magnitude over s."""
        return scales_of(blocks.abs().amax(1, keepdim=True), self.levels)

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the scales [B, 1], and the packed numbers [B, n·bits/8]."""
        scales = self.scales(blocks)
        numbers = in_units_of(scales, blocks)  # NaN only where the scale is inf or NaN, which is all that counts there
        numbers = numbers.add_(noise).floor_() if self.draws else numbers.round_()
        # In fp32 the largest may come out as s + 1: 127 plus noise just below 1 is 128.
        return scales, pack_blocks(numbers.clamp_(-self.levels, self.levels), self.bits)

    def decode_into(self, code: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """Write the numbers times the scales."""
        scales, packed = code
        return unpack_blocks_into(packed, self.bits, blocks).mul_(scales)

    def relative_error(self) -> float:
        """Return (√(1 + (n - 1)/s²) - 1)/2 or, when rounding to nearest, q/(1 + q) with q = (n - 1)/(4s²).

        The largest element is exact, s in units of c. Any other, with fraction f, adds f(1 - f) to the expected error
        and at least f² to the squared norm: for a relative error r, f(1 - f) - r·f² is at most 1/(4(1 + r)), so the
        worst case satisfies (n - 1)/(4(1 + r)) = r·s². Rounding to nearest has an error of at most 1/2, and at most
        x/c.
        """
        q = (self.block - 1) / (4 * self.levels**2)
        return (math.sqrt(1 + 4 * q) - 1) / 2 if self.draws else q / (1 + q)
