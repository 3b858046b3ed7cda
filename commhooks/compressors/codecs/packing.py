"""Integers of 1, 2, 4 or 8 bits, packed into bytes.

A block is cut into as many equal parts as a byte holds numbers: byte k has the k-th number of each part, the first
part's in its lowest bits. So packing and unpacking work on long runs, and neighbouring elements stay neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Pack integers stored as floating-point numbers [B, n] into signed bytes [B, n·bits/8].

    They are at most 2**(bits - 1) - 1 in magnitude. A byte is the sum of its numbers times powers of 2**bits: their
    digits in a balanced system, which has no offset.
    """
    first, *others = numbers.chunk(8 // bits, dim=1)
    for place, digits in enumerate(others, 1):
        first = torch.add(first, digits, alpha=2.0 ** (bits * place))
    return first.to(torch.int8)


def unpack_into(packed: Tensor, bits: int, numbers: Tensor) -> Tensor:
    """Unpack signed bytes [B, n·bits/8] into floating-point numbers [B, n], and return these."""
    if bits == 8:
        return numbers.copy_(packed)
    *parts, last = numbers.chunk(8 // bits, dim=1)
    for part in parts:
        digits = (packed << 8 - bits) >> 8 - bits  # the lowest bits, with their sign
        part.copy_(digits)
        packed = (packed - digits) >> bits
    last.copy_(packed)
    return numbers


def pack_signs(values: Tensor) -> Tensor:
    """Pack the sign bits of fp32 values [B, n] into bytes [B, n/8]: bit b of byte k is that of element b·n/8 + k."""
    masks = values.view(torch.int32).unflatten(1, (8, -1)) >> 31  # 0, or -1 for a sign
    powers = (1 << torch.arange(8, dtype=torch.int32, device=values.device)).unsqueeze(1)
    packed: Tensor = masks.bitwise_and_(powers).sum(1, dtype=torch.int32)
    return packed.to(torch.uint8)


def unpack_signs(packed: Tensor, magnitudes: Tensor, values: Tensor) -> Tensor:
    """Write magnitudes, broadcast to values [B, n], with the signs that were packed, and return the values."""
    if values.dtype != torch.float32:
        ones = torch.ones(1, 1, dtype=torch.float32, device=packed.device)
        return values.copy_(unpack_signs(packed, ones, torch.empty_like(values, dtype=torch.float32))).mul_(magnitudes)
    bits = values.view(torch.int32).unflatten(1, (8, -1))
    shifts = torch.arange(31, 23, -1, dtype=torch.int32, device=packed.device).unsqueeze(1)
    torch.bitwise_left_shift(packed.int().unsqueeze(1), shifts, out=bits)
    bits.bitwise_and_(-(2**31)).bitwise_or_(magnitudes.view(torch.int32).unsqueeze(1))
    return values


def unpack_masks(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the signs that `pack_signs` packed as masks [B, n] of an integer dtype: -1 for a sign, otherwise 0."""
    last = 8 * dtype.itemsize - 1
    shifts = torch.arange(last, last - 8, -1, dtype=dtype, device=packed.device).unsqueeze(1)
    bits = packed.to(dtype).unsqueeze(1) << shifts
    return bits.bitwise_right_shift_(last).flatten(1)


def pack_small_floats(magnitudes: Tensor, values: Tensor) -> Tensor:
    """Pack 4-bit floating-point numbers [B, n] into bytes [B, n/2], byte k those of elements k and n/2 + k.

    `magnitudes` are their lower three bits, as floating-point numbers or integers; the fourth is the sign of `values`,
    fp32.
    """
    signs = values.view(torch.int32).clamp(-1, 0).to(torch.int8)  # faster on a CPU than a shift
    low, high = torch.sub(magnitudes.to(torch.int8), signs, alpha=8).chunk(2, dim=1)
    return torch.add(low, high, alpha=16).view(torch.uint8)


def unpack_small_floats(packed: Tensor, exponent_bits: int, blocks: Tensor) -> Tensor:
    """Write 4-bit floating-point numbers to blocks [B, n], and return these: sign, 2 or 3 exponent bits, fraction.

    fp16 has the sign in the same place, and 5 exponent bits, whose bias is greater by 16 - 2**(exponent_bits - 1).
    """
    packed = packed.view(torch.int8)
    bits = torch.cat([packed * 16, packed], dim=1).to(torch.int16)  # nibbles as the upper halves of bytes, with signs
    kept = (7 << 7 + exponent_bits) - (1 << 15)  # the sign, and the nibble's other bits once they are shifted
    bits.mul_(8 << exponent_bits).bitwise_and_(kept)
    return blocks.copy_(bits.view(torch.float16)).mul_(2.0 ** (16 - 2 ** (exponent_bits - 1)))


def widened(packed: Tensor) -> Tensor:
    """Return 8-bit floating-point numbers as 16-bit ones, in int16, with one exponent bit more behind the sign."""
    bits = packed.view(torch.int8).to(torch.int16)  # its sign fills the upper byte
    return bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
