"""Int8 and int4: integers from -127 to 127 or from -7 to 7, and one scale per block.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022; with 4 bits, as gradients are sent
by Markov et al., "CGX", Middleware 2022.
Idea: a block is divided by its largest magnitude over 127 (or 7), and rounded to integers: either down or up at random,
which is right on average, or to the nearest integer, which has a smaller error and so is better under error feedback.
Bytes: 1 per element and 4 per block, or 1/2 and 4. Stochastic: unbiased; for blocks of n elements and s levels at most
(√(1 + (n - 1)/s²) - 1)/2 is lost: 0.002 (int8) or 0.45 (int4) at 128. Nearest: 0.002 or 0.39, and biased. int4 may lose
more than it is given from blocks of 394 elements on, but no element is off by more than 1/7 of the largest, so error
feedback is safe with blocks of any size.
Weakness: one large element makes the steps coarse for its whole block. On a CPU, a step of eager passes takes as long
as 20 to 34 copies of the gradient; of compiled ones, 6 to 9.
"""

from __future__ import annotations

import dataclasses

from commhooks.compressors.codecs.uniform import Uniform


@dataclasses.dataclass(frozen=True, kw_only=True)
class Integers(Uniform):
    """Integers of a fixed number of bits, scaled so that the largest magnitude becomes the largest integer."""

    block: int = 128
    stochastic: bool = True
    """False: round to the nearest integer. This loses less, but with a bias, so it needs error feedback."""

    @property
    def draws(self) -> bool:
        """True if rounding is stochastic."""
        return self.stochastic

    def contraction(self) -> float:
        """Return at most 1/s²: no element is off by more than c, a fraction 1/s of the block's largest magnitude.

        So with error feedback no element of the residual exceeds 1/(s - 1) of the largest gradient, for any block size.
        """
        return min(self.relative_error(), 1 / self.levels**2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(Integers):
    """8-bit integers, scaled by 1/127 of the largest magnitude of each block."""

    levels = 127


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4(Integers):
    """4-bit integers, packed two to a byte, scaled by 1/7 of the largest magnitude of each block."""

    levels = 7
