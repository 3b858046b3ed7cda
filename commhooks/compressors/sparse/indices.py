"""Codes for the indices of a message's elements, in few bytes.

Whole indices take 4 bytes. If a parameter is divided into blocks, and every block sends the same fraction of its
elements, an index need only tell an element's position in its block: 12 bits for blocks of 4,096, 16 for blocks of
65,536, without counts. One bit for every element, sent or not, is shorter if more than one element in twelve is sent.

The coded number of an element is an index, or a position in a block, to which `starts` gives the offset. The parameters
of a bucket that have the same coding share a code.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from commhooks.compressors.kernels.selection import largest
from commhooks.compressors.kernels.sums import EqualBlocks, PackedNumbers, UnpackedNumbers
from commhooks.native.largest import MOST, SparseKernels
from commhooks.packing import pack_integers, packed_bytes, unpack_integers
from commhooks.tensors import has_numpy

Indices = Literal["auto", "int32", "block-12", "block-16", "bitmap"]
Numbers = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Coding(ABC):
    """A choice of a fraction `ratio` of parameters' elements, and a code for their indices."""

    sizes: tuple[int, ...]
    """Each parameter's elements."""
    ratio: float
    dtype: ClassVar[torch.dtype] = torch.uint8
    """The dtype of codes."""

    def block(self, elements: int) -> int:
        """Return the size of a parameter's blocks, each of which sends a share; the last block may be smaller."""
        return elements

    def share(self, elements: int) -> int:
        """Return the number of elements sent of a block of `elements`."""
        return math.ceil(self.ratio * elements)

    def sent(self, elements: int) -> int:
        """Return the number of elements sent of a parameter."""
        block = self.block(elements)
        return elements // block * self.share(block) + self.share(elements % block)

    @functools.cached_property
    def k(self) -> int:
        """The number of elements sent."""
        return sum(map(self.sent, self.sizes))

    @property
    @abstractmethod
    def code_bytes(self) -> int:
        """The size of the code for all indices, in bytes."""

    @abstractmethod
    def encode(self, numbers: Tensor) -> Tensor:
        """Return the code for the numbers of all parameters, in the order in which `choose` returns them."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Return the numbers W×k that the codes of W ranks represent: int32, or int64."""

    def received(self, codes: Tensor) -> PackedNumbers | UnpackedNumbers:
        """Return the numbers that the codes of W ranks represent, decoded when they are needed."""
        return UnpackedNumbers(self.decode(codes))

    def choose(self, number: int, memory: Tensor) -> Tensor:
        """Return the numbers of the largest elements of one parameter, given its index and memory, block by block."""
        found = []
        for blocks in self.blocks(number):
            rows = memory[blocks.memory].view(-1, blocks.block)
            found.append(self._numbers(largest(rows, self.share(blocks.block)), number, blocks.memory.start).flatten())
        return found[0] if len(found) == 1 else torch.cat(found)

    def can_take(self, number: int) -> bool:
        """Return whether `take` can search one parameter, given its index."""
        return all(blocks.block <= MOST for blocks in self.blocks(number))

    def take(
        self, native: SparseKernels, number: int, memory: Tensor, residual: Tensor | None, least: float
    ) -> tuple[Tensor, Tensor]:
        """Return what `choose` returns of a sum with a residual, and the values; see `SparseKernels.take`."""
        found = []
        for blocks in self.blocks(number):
            rows, kept = (
                None if one is None else one[blocks.memory].view(-1, blocks.block) for one in (memory, residual)
            )
            assert rows is not None, "there is memory, if perhaps no residual"
            found.append([one.flatten() for one in native.take(rows, self.share(blocks.block), kept, least)])
        numbers, values = (one[0] if len(one) == 1 else torch.cat(one) for one in zip(*found, strict=True))
        return numbers, values

    def blocks(self, number: int, start: int = 0, first: int = 0) -> list[EqualBlocks]:
        """Return the blocks of one parameter, given its index, where its memory begins, and its first entry."""
        elements, found = self.sizes[number], []
        block = self.block(elements)
        for size, count in ((block, elements // block), (elements % block, 1)):
            if size:
                end, last = start + count * size, first + count * self.share(size)
                found.append(EqualBlocks(slice(start, end), size, slice(first, last)))
                start, first = end, last
        return found

    def shares(self, number: int) -> list[int]:
        """Return the numbers of elements sent of each block of one parameter, given its index."""
        elements = self.sizes[number]
        block = self.block(elements)
        return [self.share(min(block, elements - first)) for first in range(0, elements, block)]

    def starts(self, offsets: Sequence[int]) -> Numbers:
        """Return offsets [k] that turn numbers into indices into memory where parameters have these offsets."""
        found = []
        for number, (elements, offset) in enumerate(zip(self.sizes, offsets, strict=True)):
            firsts = np.arange(0, elements, self.block(elements)) + offset
            found.append(np.repeat(firsts, self.shares(number)))
        return np.concatenate(found)

    def relative_error(self) -> float:
        """Return the largest |unsent|²/|formed|²: in each block, the elements sent have at least the average size."""
        blocks = {size for n in self.sizes for size in (self.block(n), n % self.block(n)) if size}
        return max(1 - self.share(size) / size for size in blocks)

    def _numbers(self, in_blocks: Tensor, number: int, first: int) -> Tensor:
        """Return the numbers for positions in blocks [B, share], of which the first one begins at `first`."""
        return in_blocks


class Int32(Coding):
    """Indices of 4 bytes."""

    dtype: ClassVar[torch.dtype] = torch.int32

    @property
    def code_bytes(self) -> int:
        """Four per index."""
        return 4 * self.k

    def encode(self, numbers: Tensor) -> Tensor:
        """Return int32 numbers."""
        return numbers.to(torch.int32)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the code."""
        return codes


@dataclasses.dataclass(frozen=True)
class InBlocks(Coding):
    """Indices of 12 or 16 bits into blocks of 2**bits elements."""

    bits: int = 16

    def block(self, elements: int) -> int:
        """Return the number of elements that the bits can address, at most `elements`."""
        return min(elements, 1 << self.bits)

    @property
    def code_bytes(self) -> int:
        """Three per two indices, or two per index."""
        return packed_bytes(self.k, self.bits)

    def encode(self, numbers: Tensor) -> Tensor:
        """Return bytes that pack the numbers' bits; see `commhooks.packing`."""
        return pack_integers(numbers, self.bits)

    def decode(self, codes: Tensor) -> Tensor:
        """Return int32 numbers."""
        return unpack_integers(codes, self.bits, (self.k,))

    def received(self, codes: Tensor) -> PackedNumbers:
        """Return the numbers, which compiled code decodes while it adds up the values."""
        return PackedNumbers(codes, self.bits, self.k)


class Bitmap(Coding):
    """A bit for each element, in the order of parameters; values are sent in index order."""

    def block(self, elements: int) -> int:
        """Return 65,536, which `torch.topk` searches in less time and memory than everything at once."""
        return min(elements, 1 << 16)

    @property
    def code_bytes(self) -> int:
        """An eighth per element."""
        return (sum(self.sizes) + 7) // 8

    def starts(self, offsets: Sequence[int]) -> Numbers:
        """Return them; here numbers count elements from the first parameter's first one on."""
        before = np.cumsum((0, *self.sizes[:-1]))
        return np.repeat(np.asarray(offsets) - before, [self.sent(elements) for elements in self.sizes])

    def encode(self, numbers: Tensor) -> Tensor:
        """Return uint8 numbers: bit i of number j represents element 8·j + i."""
        bits = torch.zeros(8, self.code_bytes, dtype=torch.uint8, device=numbers.device)
        bits.view(-1).index_fill_(0, numbers % 8 * self.code_bytes + numbers // 8, 1)
        return bits.bitwise_left_shift_(_shifts(numbers).unsqueeze(1)).sum(0, dtype=torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the indices of the bits that are set; since their number k is known, the host need not wait."""
        if has_numpy(codes):
            found = np.empty((len(codes), self.k), np.int32 if sum(self.sizes) < 1 << 31 else np.int64)
            for code, in_order in zip(codes.numpy(), found, strict=True):
                in_order[:] = np.flatnonzero(np.unpackbits(code, bitorder="little").view(bool))
            return torch.from_numpy(found)
        bits = (
            torch.arange(256, dtype=torch.int64, device=codes.device).unsqueeze(1) >> _shifts(codes) & 1
        )  # 256×8: of every number
        counts = bits.sum(1, dtype=torch.int32)
        # The bits of each number, with the set bits first.
        set_first = bits.argsort(dim=1, descending=True, stable=True).flatten()
        numbers = torch.arange(self.code_bytes, dtype=torch.int64, device=codes.device)
        decoded = []
        for code in codes:
            set_in = counts[code.int()]
            at = numbers.repeat_interleave(set_in, output_size=self.k)  # the number that holds each index
            nth = torch.arange(self.k, dtype=torch.int64, device=codes.device) - (set_in.cumsum(0) - set_in)[at]
            decoded.append(at * 8 + set_first[code[at].int() * 8 + nth])
        return torch.stack(decoded)

    def can_take(self, number: int) -> bool:
        """Return False: `take` does not return elements in ascending order."""
        return False

    def _numbers(self, in_blocks: Tensor, number: int, first: int) -> Tensor:
        """Return the numbers, in ascending order."""
        first += sum(self.sizes[:number])
        starts = torch.arange(len(in_blocks), dtype=torch.int64, device=in_blocks.device).mul_(1 << 16).add_(first)
        in_order = (
            torch.from_numpy(np.sort(in_blocks.numpy())) if has_numpy(in_blocks) else in_blocks.sort(dim=1).values
        )
        return in_order + starts.unsqueeze(1)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


@functools.lru_cache(maxsize=4096)
def coding_of(indices: Indices, elements: int, ratio: float, value_bytes: int = 4) -> Coding:
    """Return the coding for a parameter; for "auto", the one with the fewest bytes for values and indices together."""
    known = {
        "int32": Int32((elements,), ratio),
        "block-12": InBlocks((elements,), ratio, bits=12),
        "block-16": InBlocks((elements,), ratio, bits=16),
        "bitmap": Bitmap((elements,), ratio),
    }
    if indices != "auto":
        return known[indices]
    return min(known.values(), key=lambda coding: coding.k * value_bytes + coding.code_bytes)


def codings_of(
    indices: Indices, sizes: Sequence[int], ratio: float, value_bytes: int
) -> list[tuple[Coding, list[int]]]:
    """Return the codings for some parameters, each with the positions of the parameters that share it."""
    alike: dict[Coding, list[int]] = {}
    for position, elements in enumerate(sizes):
        coding = coding_of(indices, elements, ratio, value_bytes)
        alike.setdefault(dataclasses.replace(coding, sizes=()), []).append(position)
    return [
        (dataclasses.replace(coding, sizes=tuple(sizes[at] for at in positions)), positions)
        for coding, positions in alike.items()
    ]


def largest_error(indices: Indices, elements: int, ratio: float) -> float:
    """Return 1 - k/n for the block that sends the smallest fraction, for values of any dtype."""
    codings = [coding_of(indices, elements, ratio, value_bytes) for value_bytes in (4, 8)] if elements else []
    return max((coding.relative_error() for coding in codings), default=0.0)
