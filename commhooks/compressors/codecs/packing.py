"""Integers of 1, 2, 4 or 8 bits, packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack integers stored as floating-point numbers [B, n], from 0 to 2**bits - 1, into bytes [B, n·bits/8]."""
    if bits == 8:
        return numbers.to(torch.uint8)
    powers = (1 << torch.arange(0, 8, bits, device=numbers.device)).to(numbers.dtype)
    packed = numbers.view(-1, 8 // bits) @ powers  # integers up to 255, exact in any precision
    return packed.to(torch.uint8).view(len(numbers), -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers [B, n], in fp32."""
    if bits == 8:
        return packed.float()
    return look_up(packed, torch.arange(2.0**bits, device=packed.device))


def look_up(packed: Tensor, values: Tensor) -> Tensor:
    """Decode packed numbers [B, n] with a table of values: 2, 4, 16 or 256 in fp32."""
    bits = (len(values) - 1).bit_length()
    if bits < 8:
        shifts = torch.arange(0, 8, bits, device=packed.device)
        numbers = torch.arange(256, device=packed.device).unsqueeze(1) >> shifts & 2**bits - 1  # of every byte
        # Two values are looked up as one float64: single numbers are copied faster than short rows.
        values = values.index_select(0, numbers.flatten()).view(256, -1).view(torch.float64).squeeze(1)
    return values.index_select(0, packed.flatten().int()).view(torch.float32).view(len(packed), -1)
