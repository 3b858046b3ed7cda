"""A code of your own for two hops: 3 bits an element, rounded up or down at random.

commhooks.attach(model, ErrorFeedback(inner=TwoHop(codec=Dithering())))
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.codecs import Codec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dithering(Codec):
    """Integers from -3 to 3, times a third of the block's largest magnitude."""

    block: int = 64
    multiple = 8  # as many elements fill three bytes
    draws = True
    is_unbiased = True

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return scales [B, 1], and bytes [B, 3·block/8]."""
        scales = (blocks.abs().amax(1, keepdim=True) / 3).clamp_(min=torch.finfo(torch.float32).tiny)
        numbers = (blocks / scales).nan_to_num_(0.0).add_(noise).floor_().clamp_(-3, 3)
        numbers = numbers.add_(3).to(torch.int32)
        eights = (numbers.unflatten(1, (-1, 8)) << 3 * torch.arange(8, device=blocks.device)).sum(2)
        return scales, (eights.unsqueeze(2) >> 8 * torch.arange(3, device=blocks.device) & 255).flatten(1).to(
            torch.uint8
        )

    def decode(self, code: Sequence[Tensor]) -> Tensor:
        """Return blocks [B, block]."""
        scales, packed = code
        threes = packed.unflatten(1, (-1, 3)).to(torch.int32) << 8 * torch.arange(3, device=packed.device)
        numbers = threes.sum(2, keepdim=True) >> 3 * torch.arange(8, device=packed.device) & 7
        return (numbers.flatten(1) - 3).to(scales.dtype) * scales

    def relative_error(self) -> float:
        """Return block/36: at worst, all elements but the largest are half a step from a number."""
        return self.block / 36

    def contraction(self) -> float:
        """Return 1/9: no element is off by more than a third of the largest magnitude."""
        return 1 / 9
