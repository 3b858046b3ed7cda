"""Sign: one bit an element, and one scale a block.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019, section 4; blockwise as in Zheng, Huang, Kwok,
"Communication-Efficient Distributed Blockwise Momentum SGD", NeurIPS 2019.
Idea: a block becomes its signs times the mean of its magnitudes, the scale that is closest to it.
Bytes: 1/8 an element and 4 a block. Contractive: the more alike a block's magnitudes, the less is lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.errors import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sign(Codec):
    """Signs, packed eight to a byte, and the mean magnitude of each block."""

    block: int = 128

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise SettingsError(f"Sign(block={self.block!r}): block must be a multiple of 8.")

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return the scales [B, 1], and bytes of 8 signs each [B, block/8]."""
        bits = (blocks >= 0).view(-1, 8).float() @ _powers(blocks)  # whole numbers up to 255, exact in any precision
        return blocks.abs().mean(1, keepdim=True), bits.to(torch.uint8).view(len(blocks), -1)

    def decode(self, code: Sequence[Tensor]) -> Tensor:
        """Return the signs times the scales."""
        scales, packed = code
        bits = torch.arange(256, device=packed.device).unsqueeze(1) & _powers(packed).long()  # 256×8: of every byte
        signs = torch.where(bits > 0, 1.0, -1.0).to(scales.dtype)
        return signs.index_select(0, packed.flatten().int()).view(len(packed), -1).mul_(scales)

    def relative_error(self) -> float:
        """Return 1 - 1/block: a block with a single element that is not 0 is matched worst."""
        return 1 - 1 / self.block


def _powers(like: Tensor) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.float32, device=like.device)
