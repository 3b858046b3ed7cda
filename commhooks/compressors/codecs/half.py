"""Half: elements of 16 bits, summed in fp32.

Source: no paper. PyTorch's fp16_compress_hook sums in 16 bits on the wire, so a ring rounds the sum once on each of its
hops; here the sum is computed in fp32, and rounded once.
Idea: each rank's elements are rounded to 16 bits, decoded and added up in fp32, and the mean is rounded; to the nearest
number or, in bf16, up with the probability of the part that is cut off, which is right on average.
Bytes: 2 per element. Contractive: it loses at most the square of the unit roundoff, 2.4e-7 (fp16) or 1.5e-5 (bf16),
except for elements that become 0. Slightly biased, unless stochastic, so there is no error feedback unless requested.
Weakness: two rounds, for the same bytes as a cast; in fp16 an element above 65,504 becomes inf, and one below 3e-8
becomes 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.language.settings import refusal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Half(Codec):
    """Elements rounded to `dtype`."""

    dtype: torch.dtype
    """`torch.float16` has more digits, `torch.bfloat16` a larger range."""
    block: int = 128
    stochastic: bool = False
    """True: round at random, which loses twice as much of most elements, but is right on average; only for bf16."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise refusal(self, "dtype", "must be torch.float16 or torch.bfloat16")
        if self.stochastic and self.dtype != torch.bfloat16:
            raise refusal(
                self,
                "stochastic",
                "must be False for torch.float16: below 6e-5 its numbers are too far apart for 16 random bits; "
                "use torch.bfloat16",
            )

    @property
    def draws(self) -> bool:
        """True if rounding is stochastic."""
        return self.stochastic

    @property
    def is_unbiased(self) -> bool:
        """True if rounding is stochastic."""
        return self.stochastic

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the elements [B, block].

        bf16 numbers are fp32 numbers without their last 16 bits. 16 random bits are added to these, and carry with a
        probability equal to the fraction that is cut off, down to the smallest number. Blocks in fp64 become fp32
        first. A NaN is left unchanged, since the carry could turn it into 0.
        """
        if not self.stochastic:
            return [blocks.to(self.dtype)]
        values = blocks.float()
        bits = (noise * 2.0**16).int().add_(values.view(torch.int32)).bitwise_and_(-(2**16))
        return [torch.where(values.isnan(), values, bits.view(torch.float32)).to(self.dtype)]

    def decode_into(self, code: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """Write the elements, wider."""
        return blocks.copy_(code[0])

    def relative_error(self) -> float:
        """Return the square of the unit roundoff u; an element that becomes 0 loses more, but is small.

        Numbers are 2u apart, in units of the power of two below an element. The nearest is off by at most u, and the
        expected square of a random choice is at most that of the middle, u² as well.
        """
        return float((torch.finfo(self.dtype).eps / 2) ** 2)
