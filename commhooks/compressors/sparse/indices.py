"""Codes that tell which elements of a parameter a message holds, in few bytes.

Whole indices take 4 bytes. If a parameter is divided into blocks, and every block sends the same fraction of its
elements, an index need only tell an element's position in its block: 12 bits for blocks of 4,096, 16 for blocks of
65,536, without counts. One bit for every element, sent or not, is shorter if more than one element in twelve is sent.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from commhooks.compressors.sparse.largest import largest

Indices = Literal["auto", "int32", "block-12", "block-16", "bitmap"]


@dataclasses.dataclass(frozen=True)
class Coding(ABC):
    """Which `ratio` of a parameter's `elements` may be sent, and how their indices are coded."""

    elements: int
    ratio: float

    @property
    def block(self) -> int:
        """The number of elements that a share is chosen from; a parameter's last block may have fewer."""
        return self.elements

    @property
    def share(self) -> int:
        """The number of elements sent from a whole block."""
        return math.ceil(self.ratio * self.block)

    @property
    def last_share(self) -> int:
        """The number of elements sent from the remainder after the last whole block."""
        return math.ceil(self.ratio * (self.elements % self.block))

    @property
    def k(self) -> int:
        """The number of elements sent."""
        return self.elements // self.block * self.share + self.last_share

    @property
    @abstractmethod
    def code_bytes(self) -> int:
        """The size of the code for all indices, in bytes."""

    @abstractmethod
    def encode(self, places: Tensor) -> Tensor:
        """Return the code for indices in the order in which `choose` returns them."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Return the indices W×k that the codes of W ranks represent."""

    def choose(self, memory: Tensor) -> Tensor:
        """Return the indices of the largest elements, k in all, block by block."""
        whole = self.elements // self.block
        rest = memory[whole * self.block :].unsqueeze(0)
        found = [largest(memory[: whole * self.block].view(whole, self.block), self.share)]
        found[0] += torch.arange(0, whole * self.block, self.block, device=memory.device).unsqueeze(1)
        if self.last_share:
            found.append(largest(rest, self.last_share) + whole * self.block)
        return torch.cat([places.flatten() for places in found])

    def relative_error(self) -> float:
        """Return the largest |unsent|²/|formed|²: in each block, what is sent has at least the average size."""
        rest = self.elements % self.block
        return max(1 - self.share / self.block, 1 - self.last_share / rest if rest else 0.0)


class Int32(Coding):
    """Indices of 4 bytes."""

    @property
    def code_bytes(self) -> int:
        """Four per index."""
        return 4 * self.k

    def encode(self, places: Tensor) -> Tensor:
        """Return int32 numbers."""
        return places.to(torch.int32)

    def decode(self, codes: Tensor) -> Tensor:
        """Return int64 numbers."""
        return codes.long()


@dataclasses.dataclass(frozen=True)
class InBlocks(Coding):
    """Indices of 12 or 16 bits into blocks of 2**bits elements."""

    bits: int = 16

    @property
    def block(self) -> int:
        """As many as the bits can address."""
        return min(self.elements, 1 << self.bits)

    @property
    def code_bytes(self) -> int:
        """Three per two indices, or two per index."""
        return 3 * ((self.k + 1) // 2) if self.bits == 12 else 2 * self.k

    def encode(self, places: Tensor) -> Tensor:
        """Return int16 numbers from -2**15 on, or uint8 [3·pairs], the bytes of all pairs in three consecutive runs."""
        local = places - self._starts(places)
        if self.bits == 16:
            return local.sub_(1 << 15).to(torch.int16)
        first, second = torch.nn.functional.pad(local, (0, self.k % 2)).view(2, -1)
        return torch.cat([first & 255, first >> 8 | second << 4 & 240, second >> 4]).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Return them as indices into the parameter."""
        if self.bits == 16:
            local = codes.long().add_(1 << 15)
        else:
            low, middle, high = codes.view(len(codes), 3, -1).long().unbind(1)
            local = torch.cat([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=1)[:, : self.k]
        return local + self._starts(local)

    def _starts(self, like: Tensor) -> Tensor:
        """Return where the block of each index begins; the last block has at most as many."""
        return torch.arange(self.k, device=like.device).div_(self.share, rounding_mode="floor").mul_(self.block)


class Bitmap(Coding):
    """One bit per element; values are sent in index order."""

    @property
    def block(self) -> int:
        """65,536, which `torch.topk` searches in less time and memory than everything at once."""
        return min(self.elements, 1 << 16)

    @property
    def code_bytes(self) -> int:
        """An eighth per element."""
        return (self.elements + 7) // 8

    def choose(self, memory: Tensor) -> Tensor:
        """Return the indices in ascending order."""
        return super().choose(memory).sort().values

    def encode(self, places: Tensor) -> Tensor:
        """Return uint8 numbers: bit i of number j represents element 8·j + i."""
        bits = torch.zeros(8, self.code_bytes, dtype=torch.uint8, device=places.device)
        bits.view(-1).index_fill_(0, places % 8 * self.code_bytes + places // 8, 1)
        return bits.bitwise_left_shift_(_shifts(places).unsqueeze(1)).sum(0, dtype=torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the indices of the bits that are set; since their number k is known, the host need not wait."""
        bits = torch.arange(256, device=codes.device).unsqueeze(1) >> _shifts(codes) & 1  # 256×8: of every number
        counts = bits.sum(1, dtype=torch.int32)
        # The bits of each number, with the set bits first.
        set_first = bits.argsort(dim=1, descending=True, stable=True).flatten()
        numbers = torch.arange(self.code_bytes, device=codes.device)
        found = []
        for code in codes:
            set_in = counts[code.int()]
            at = numbers.repeat_interleave(set_in, output_size=self.k)  # the number that holds each index
            nth = torch.arange(self.k, device=codes.device) - (set_in.cumsum(0) - set_in)[at]
            found.append(at * 8 + set_first[code[at].int() * 8 + nth])
        return torch.stack(found)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


@functools.lru_cache(maxsize=4096)
def coding_of(indices: Indices, elements: int, ratio: float, value_bytes: int = 4) -> Coding:
    """Return the coding for a parameter; for "auto", the one with the fewest bytes for values and indices together."""
    known = {
        "int32": Int32(elements, ratio),
        "block-12": InBlocks(elements, ratio, bits=12),
        "block-16": InBlocks(elements, ratio, bits=16),
        "bitmap": Bitmap(elements, ratio),
    }
    if indices != "auto":
        return known[indices]
    return min(known.values(), key=lambda coding: coding.k * value_bytes + coding.code_bytes)


def largest_error(indices: Indices, elements: int, ratio: float) -> float:
    """Return 1 - k/n for the block that sends the smallest fraction, for values of any dtype."""
    codings = [coding_of(indices, elements, ratio, value_bytes) for value_bytes in (4, 8)] if elements else []
    return max((coding.relative_error() for coding in codings), default=0.0)
