"""Memory that exchanges borrow and give back, so that steps allocate none.

Allocating memory in every step costs more than the arithmetic on it: an allocator returns large blocks to the system,
which fills them with zeros before it lends them again. On a GPU, PyTorch's allocator keeps freed memory, by stream, so
nothing is kept here.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

IS_CHECKED = os.environ.get("COMMHOOKS_CHECK_TILES", "0") not in ("", "0")
"""If True, check for mistakes that would pass unnoticed, at some cost."""
_SMALLEST = 1 << 12
"""Blocks have a power of two of bytes, or a sixteenth more, up to the next; none is smaller than this."""
_MOST = 4
"""The largest ratio of a block's size to the size that it is lent for."""
_LOANS_UNTIL_UNUSED = 64
"""Loans per free block between two clean-ups, which drop the blocks that nobody has borrowed."""


class Pool:
    """Free blocks of memory, shared by the buckets of one model. It is used by one thread at a time."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: set[int] = set()
        """The addresses of blocks that were borrowed since the last clean-up."""
        self._loans = 0

    def take(self, size: int) -> Tensor:
        """Return a block of at least `size` bytes, uint8."""
        wanted = _rounded(size)
        self._loans += 1
        fitting = [block for block in self._free if wanted <= block.numel() <= _MOST * wanted]
        if fitting:
            block = min(fitting, key=Tensor.numel)
            self._free = [free for free in self._free if free is not block]
        else:
            block = torch.empty(wanted, dtype=torch.uint8, device="cpu")
        self._lent.add(block.data_ptr())
        return block

    def put(self, block: Tensor) -> None:
        """Take a block back."""
        if IS_CHECKED:
            block.fill_(255)  # NaN, for whoever still reads it
        self._free.append(block)
        if self._loans > _LOANS_UNTIL_UNUSED * len(self._free):
            self._free = [free for free in self._free if free.data_ptr() in self._lent]
            self._lent.clear()
            self._loans = 0

    def blocks(self) -> list[Tensor]:
        """Return the blocks that nobody has borrowed."""
        return list(self._free)


class Loans:
    """The blocks of memory that one bucket's exchange has borrowed from a pool."""

    def __init__(self) -> None:
        self.pool: Pool = Pool()
        self.blocks: dict[int, Tensor] = {}
        """The borrowed blocks, by address."""

    def borrow(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory, not initialised, until it is given back; the exchange's end gives everything back."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = shape.numel() * dtype.itemsize
        block = self.pool.take(size)
        self.blocks[block.data_ptr()] = block
        return block[:size].view(dtype).view(shape)

    def give_back(self, *borrowed: Tensor) -> None:
        """Give back memory that is no longer read; ignore memory that was not borrowed here."""
        for tensor in borrowed:
            block = self.blocks.pop(tensor.untyped_storage().data_ptr(), None)
            if block is not None:
                self.pool.put(block)

    def end(self) -> None:
        """Give everything back."""
        while self.blocks:
            self.pool.put(self.blocks.popitem()[1])


def _rounded(size: int) -> int:
    """Round bytes up to one of few block sizes, so that one block serves several purposes."""
    step = max(_SMALLEST, 1 << (size - 1).bit_length()) >> 5
    return -(-size // step) * step if size > _SMALLEST else _SMALLEST
