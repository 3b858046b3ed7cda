"""QSGD: magnitudes as multiples of a fraction of their block's norm, rounded at random.

Source: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding", NeurIPS 2017, section 3.1; in blocks as in its section 4, with fixed-width numbers in place of Elias codes.
Idea: each element becomes s·x/|block|, rounded down or up at random, so that it is right on average.
Bytes: 1/4 (s = 1), 1/2 (up to 7) or 1 per element, and 4 per block. Unbiased: for blocks of n elements the expected
loss is at most min(n/s², √n/s): 0.032 at 512 and 127 levels, 3.2 at 7. So it uses no error feedback, which is rejected
from 1 on.
Weakness: with few levels most elements become 0 and the others much too large: noise, as from a smaller batch. On a
CPU, a step of eager passes takes as long as 20 to 22 copies of the gradient; of compiled ones, 5 to 6.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from commhooks.compressors.codecs.uniform import Uniform
from commhooks.language.settings import setting
from commhooks.packing import scales_of
from commhooks.tensors import power_below


@dataclasses.dataclass(frozen=True, kw_only=True)
class QSGD(Uniform):
    """Integers of magnitude at most `levels`, scaled by the norm divided by `levels`."""

    block: int = 512
    levels: int = setting(127, least=1, most=127)
    """Fewer: 4 bits per element up to 7, and 2 at 1; but more noise."""

    draws = True  # rounding is stochastic

    @property
    def compiled(self) -> tuple[str, int] | None:
        """Its compiled passes."""
        return "qsgd", self.levels

    def scales(self, blocks: Tensor) -> Tensor:
        """Return |block|/s [B, 1]; the largest magnitude is factored out first, since the square of 1e30 is inf.

        With few levels the scale of a very large block may exceed the dtype's largest number, which then takes its
        place: the code stays unbiased, and is less noisy.
        """
        kind = torch.finfo(blocks.dtype)
        largest = blocks.abs().amax(1, keepdim=True).clamp_(min=kind.tiny)
        norms: Tensor = torch.linalg.vector_norm(blocks / largest, dim=1, keepdim=True)  # NaN if the largest is inf
        shrunk = power_below(self.block)
        return scales_of(norms.mul_(largest * shrunk), self.levels * shrunk).clamp_(max=kind.max)

    def relative_error(self) -> float:
        """Return min(n/s², √n/s), the paper's lemma 3.1."""
        return min(self.block / self.levels**2, math.sqrt(self.block) / self.levels)
