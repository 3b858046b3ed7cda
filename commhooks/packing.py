"""Numbers of few bits as bytes, for codecs and compressors: integers, signs, and the scales that blocks are divided by.

In a codec each block is packed by itself, so that its code is a row: it is cut into as many equal parts as a byte holds
numbers, and byte k has the k-th number of each part, the first part's in its lowest bits. So packing and unpacking work
on long runs, and neighbouring elements stay neighbours.

`pack_integers` packs a whole tensor, such as the indices of a message. Numbers are split into runs of bits: the lowest
8 bits, a byte each, while at least 8 bits are left; then 4, 2 or 1 bits, a byte for 2, 4 or 8 numbers. With k numbers
of 4 bits, byte i holds number i and number i + ⌈k/2⌉, so this takes a few operations on runs, too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from commhooks.devices import runs_later
from commhooks.language.memory import surely
from commhooks.tensors import smallest

__all__ = [
    "in_units_of",
    "pack_blocks",
    "pack_integers",
    "pack_signs",
    "packed_bytes",
    "scales_of",
    "unpack_blocks_into",
    "unpack_integers",
    "unpack_signs",
]

_SMALL = 2.0**-64
"""Scales below this have no reciprocal that is safe in fp32."""


def scales_of(largest: Tensor, levels: float) -> Tensor:
    """Return nonzero scales, in units of which no block's largest magnitude exceeds `levels`.

    A subnormal scale may be up to a third too small; the block's largest magnitude is then cut.
    """
    return (largest / levels).clamp_(min=smallest(largest.dtype))


def in_units_of(scales: Tensor, blocks: Tensor) -> Tensor:
    """Return blocks [B, n] times the reciprocals of their scales [B, 1], in new memory.

    The reciprocal of the smallest scales would be inf. Their blocks are multiplied by a power of two first, and so are
    the scales, which changes no digit.
    """
    if not runs_later(scales) and surely(scales.amin() >= _SMALL):
        return blocks * scales.reciprocal()
    up = (scales < _SMALL).mul(1 / _SMALL).clamp_(min=1).to(scales.dtype)  # `where` would make tensors of both numbers
    return (blocks * up).mul_((scales * up).reciprocal_())


def pack_blocks(numbers: Tensor, bits: int) -> Tensor:
    """Pack integers stored as floating-point numbers [B, n] into signed bytes [B, n·bits/8].

    They are at most 2**(bits - 1) - 1 in magnitude. A byte is the sum of its numbers times powers of 2**bits: their
    digits in a balanced system, which has no offset.
    """
    first, *others = numbers.chunk(8 // bits, dim=1)
    for place, digits in enumerate(others, 1):
        first = torch.add(first, digits, alpha=2.0 ** (bits * place))
    return first.to(torch.int8)


def unpack_blocks_into(packed: Tensor, bits: int, numbers: Tensor) -> Tensor:
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


def packed_bytes(numbers: int, bits: int) -> int:
    """Return the bytes of `numbers` numbers of `bits` bits: at least ⌈numbers·bits/8⌉, and at most 2 more."""
    return sum(_run_bytes(numbers, width) for width in _widths(bits))


def pack_integers(numbers: Tensor, bits: int) -> Tensor:
    """Pack integers of any shape, each below 2**bits, into 1-D bytes; `bits` is at most 31."""
    numbers, runs, shift = numbers.reshape(-1), [], 0
    for width in _widths(bits):
        low = (numbers >> shift if shift else numbers).to(torch.uint8)  # modulo 256
        if width < 8:
            low = low & (1 << width) - 1
            length = _run_bytes(len(numbers), width)
            low = pad(low, (0, length * (8 // width) - len(low))).view(-1, length)
            low = (low << _shifts(width, low)).sum(0, dtype=torch.uint8)
        runs.append(low)
        shift += width
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def unpack_integers(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """Unpack what `pack_integers` made of integers of this shape, [..., bytes], into int32 [..., *shape]."""
    count, numbers, shift = torch.Size(shape).numel(), None, 0
    for width in _widths(bits):
        length = _run_bytes(count, width)
        run, packed = packed[..., :length], packed[..., length:]
        if width < 8:
            run = run.unsqueeze(-2) >> _shifts(width, run) & (1 << width) - 1
            run = run.flatten(-2)[..., :count]
        if numbers is None:
            numbers = run.int()
        else:
            numbers |= run.int() << shift
        shift += width
    assert numbers is not None, "numbers have at least one bit"
    return numbers.view(*numbers.shape[:-1], *shape)


def _widths(bits: int) -> list[int]:
    """Return the bits of each run."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]


def _run_bytes(numbers: int, width: int) -> int:
    return -(-numbers * width // 8)


def _shifts(width: int, like: Tensor) -> Tensor:
    """Return the shift of each of a byte's numbers, [8/width, 1]."""
    return torch.arange(0, 8, width, dtype=torch.uint8, device=like.device).unsqueeze(1)
