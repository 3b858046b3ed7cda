"""Codebook: two bits per element, which choose one of four numbers that are sent with each block.

Source: Thérien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo", 2025, which sends codes of 2 bits with
a codebook from the values' statistics. Which codebook is our choice.
Idea: a block's elements are in four classes, by sign and by whether a magnitude is below the root mean square of all.
The codebook has the classes' means. For a normally distributed block hardly any is better: a step of Lloyd's iteration
gains 0.3 % of the error, and 1 to 9 % for other distributions, for as much work again.
Bytes: 1/4 per element and 16 per block. Contractive, biased: at most 0.89 of a block of 1,024 elements is lost, and
0.117 of a normally distributed one.
Weakness: of a block of very different magnitudes most elements get one of two small numbers. There are no compiled
passes: on a CPU a step takes about twice as long as with MXFP4's eager ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.packing import in_units_of, pack_signs, scales_of, unpack_masks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codebook(Codec):
    """The sign and the size class of each element, packed eight to a byte, and four means."""

    block: int = 1024

    multiple = 8

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the means [B, 4], of the large elements and then of the small, and two bits each [B, 2, block/8].

        Within each pair, the positive class comes first. A class without elements has a mean of 0.
        """
        scales = scales_of(blocks.abs().amax(1, keepdim=True), 4.0)  # of the largest numbers 1/scale is normal as well
        x = in_units_of(scales, blocks)  # so that no square or sum is inf; NaN only in a block with an inf or a NaN
        excess = x.abs().sub_(x.square().mean(1, keepdim=True).sqrt_())
        kind = _integers(x.dtype)
        is_negative, is_small = (one.view(kind) >> 8 * x.element_size() - 1 for one in (x, excess))
        packed = torch.stack([pack_signs(x.float()), pack_signs(excess.float())], dim=1)
        small = x.view(kind).bitwise_and(is_small).view(x.dtype)
        large = x.sub_(small)
        sums = [part.sum(1) for one in (large, small) for part in (one.clamp(min=0), one.clamp(max=0))]
        masks = is_negative, is_small, is_negative & is_small
        negative, few, both = (-mask.sum(1, dtype=torch.int32) for mask in masks)
        counts = [self.block - negative - few + both, negative - both, few - both, both]
        means = torch.stack(sums, dim=1).div_(torch.stack(counts, dim=1).clamp_(min=1))
        return means.mul_(scales), packed

    def decode_into(self, code: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """Write each element's mean; masks choose its bits, which is ten times as fast as `where`."""
        means, packed = code
        kind = _integers(means.dtype)
        is_negative, is_small = (unpack_masks(plane, kind) for plane in packed.unbind(1))
        of_sizes = [_either(is_negative, *pair.chunk(2, dim=1)) for pair in means.view(kind).chunk(2, dim=1)]
        return blocks.copy_(_either(is_small, *of_sizes).view(means.dtype))

    def relative_error(self) -> float:
        """Return ((n + 1)/(√n + 1)²)² for blocks of n elements.

        Let the root mean square be 1, so |block|² = n. A class of c elements that add up to S loses its part q of n,
        except for S²/c. Signs only divide classes, which loses less, so let all x be positive.
        The large ones are from 1 to √n, so (x - 1)(√n - x) >= 0, and adding up gives S(√n + 1) >= q + c·√n; the square
        of the right side is at least 4q·c·√n. So a fraction g = 4√n/(√n + 1)² of q is not lost. Of the small ones
        x² <= x, so q² <= S², and q²/n is not lost, of a part q = p. Together (1 - g)(n - p) + p - p²/n is lost at most,
        which is largest for p = g·n/2: (1 - g/2)² of n.
        """
        n = self.block
        return ((n + 1) / (math.sqrt(n) + 1) ** 2) ** 2


def _integers(dtype: torch.dtype) -> torch.dtype:
    """Return the integer dtype with the same number of bits."""
    return torch.int32 if dtype == torch.float32 else torch.int64


def _either(mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return the bits of `one`, or of `other` where the mask is -1."""
    return (one ^ other).bitwise_and(mask).bitwise_xor_(one)
