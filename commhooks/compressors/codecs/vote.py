"""Vote: one bit per element, and nothing else.

Source: Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with Majority Vote is Communication Efficient and Fault
Tolerant", ICLR 2019, algorithm 1.
Idea: ranks send signs, and the sign of their sum is sent back. Zeros, and so ties, are decided at random: if they
counted as +1, every tie of two ranks would be a step upwards.
Bytes: 1/8 per element. Biased, and with no bound on the loss: an answer is ±1 whatever the gradient's size, so there is
no error feedback. Weakness: only signs are transmitted; use it through `Signum`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from commhooks.compressors.codecs.codec import Codec
from commhooks.packing import pack_signs, unpack_signs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vote(Codec):
    """Signs, packed eight to a byte."""

    block: int = 128

    multiple = 8
    compiled: ClassVar[tuple[str, int] | None] = "vote", 0
    draws = True  # zeros are decided at random
    shows_non_finite = False  # a bit cannot show it

    def encode(self, blocks: Tensor, noise: Tensor) -> Sequence[Tensor]:
        """Return bytes of 8 signs each [B, block/8]."""
        signs = blocks.sign().float().mul_(2)
        return [pack_signs(signs.sub_(noise).add_(0.5))]  # the noise, less than 1/2 either way, decides zeros alone

    def decode_into(self, code: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """Write -1 and 1."""
        return unpack_signs(code[0], torch.ones(1, 1, dtype=torch.float32, device=blocks.device), blocks)

    def relative_error(self) -> float:
        """Return inf: ±1 may be arbitrarily larger than the element that it represents."""
        return math.inf
