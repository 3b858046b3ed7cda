"""Small non-negative integers, packed into bytes.

Numbers are split into runs of bits: the lowest 8 bits, a byte each, while at least 8 bits are left; then 4, 2 or 1
bits, a byte for 2, 4 or 8 numbers. The numbers of a byte are far apart: with k numbers of 4 bits, byte i holds number i
and number i + ⌈k/2⌉. So packing and unpacking take a few operations on runs, instead of one for each bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def packed_bytes(numbers: int, bits: int) -> int:
    """Return the bytes of `numbers` numbers of `bits` bits: at least ⌈numbers·bits/8⌉, and at most 2 more."""
    return sum(_run_bytes(numbers, width) for width in _widths(bits))


def pack(numbers: Tensor, bits: int) -> Tensor:
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


def unpack(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """Unpack what `pack` made of integers of this shape, [..., bytes], into int32 [..., *shape]."""
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
