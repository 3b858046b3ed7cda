"""TernGrad: -1, 0 or 1 times the largest magnitude, at random.

Source: Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NeurIPS 2017,
section 3, with blocks in place of layers; its clipping, which introduces a bias, is left out.
Idea: an element becomes its sign times the block's largest magnitude, with the probability that makes it right on
average.
Bytes: 1/4 per element and 4 per block. Unbiased, with an expected loss of up to (√n - 1)/2 for a block of n elements,
5.2 at 128: too much for error feedback, whose residual would be several times the gradient; it is rejected unless
damped.
Weakness: that noise, which calls for larger batches or smaller steps. On a CPU, a step of eager passes takes as long
as 26 to 28 copies of the gradient; of compiled ones, 4 to 5.
"""

from __future__ import annotations

import dataclasses

from commhooks.compressors.codecs.uniform import Uniform


@dataclasses.dataclass(frozen=True, kw_only=True)
class TernGrad(Uniform):
    """Elements of three values, packed four to a byte, and the largest magnitude of each block."""

    block: int = 128

    levels = 1
    draws = True  # rounding is stochastic
