"""Half: elements of 16 bits, summed in fp32.

Source: no paper. PyTorch's fp16_compress_hook sums in 16 bits on the wire, so a ring rounds the sum once on each of its
hops; here the sum is computed in fp32, and rounded once.
Idea: each rank's elements are rounded to 16 bits, decoded and added up in fp32, and the mean is rounded.
Bytes: 2 per element. Contractive: it loses at most the square of the unit roundoff, 2.4e-7 (fp16) or 1.5e-5 (bf16),
except for elements that become 0. Slightly biased, so there is no error feedback unless requested.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in (torch.float16, torch.bfloat16):
            raise refusal(self, "dtype", "must be torch.float16 or torch.bfloat16")

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the elements [B, block]."""
        return [blocks.to(self.dtype)]

    def decode(self, code: Sequence[Tensor]) -> Tensor:
        """Return the elements in fp32."""
        return code[0].float()

    def relative_error(self) -> float:
        """Return the square of the unit roundoff; an element that becomes 0 loses more, but is small."""
        return float((torch.finfo(self.dtype).eps / 2) ** 2)
