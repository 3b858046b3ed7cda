"""Numbers of 1, 2, 4 or 8 bits, packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Return uint8 numbers [B, n], each below 2**bits, in bytes [B, n·bits/8].

    A byte holds numbers that lie n·bits/8 apart, so that stretches of a row are shifted as wholes.
    """
    first, *others = numbers.chunk(8 // bits, dim=1)
    for place, stretch in enumerate(others, start=1):
        first = first | stretch << place * bits
    return first


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers [B, n], uint8."""
    if bits == 8:
        return packed
    return torch.cat([packed >> place & 2**bits - 1 for place in range(0, 8, bits)], dim=1)
