"""Random numbers for blocks: few are drawn, and each block adds its own number to them.

A step draws one table of 16-bit numbers. A block takes a row of it and adds, modulo 2**16, a number that depends on its
key. Any two of the sums are independent and uniform, so every linear functional of rounding errors has the variance
that it would have with a number drawn for each element. This holds for blocks with different keys or rows. Blocks of
one parameter have different keys; blocks of two parameters share a key with a probability of 2**-32, and seldom a row
too.

Source: Carter and Wegman, "Universal Classes of Hash Functions", 1979; keys are hashed as (a·key + c) mod 2**63, of
which the upper 16 bits are pairwise independent for keys of 32 bits (Dietzfelbinger, STACS 1996).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy
import torch
from torch import Tensor

from commhooks.devices import copied_to
from commhooks.language.randomness import stable_seed

_NUMBERS = 1 << 16
"""The size of a table, in numbers, unless a row is longer."""


class Keys(NamedTuple):
    """The keys of some blocks, which determine their noise together with step, rank and hop."""

    keys: Tensor
    """int64 [B], 32 bits of which are used."""
    rows: Tensor
    """int32 [B]: each block's row of the table."""

    @classmethod
    def of(cls, name: str, blocks: int, width: int) -> Self:
        """Return the keys of a parameter's first blocks, `width` elements in each."""
        seed = stable_seed("block", name)
        numbers = torch.arange(blocks, dtype=torch.int64, device="cpu")
        return cls((numbers + seed) & 0xFFFFFFFF, ((numbers + (seed >> 32)) % _rows(width)).int())

    @classmethod
    def together(cls, keys: Sequence[Keys]) -> Self:
        """Return the keys of several parameters' blocks, one after another."""
        return cls(*map(torch.cat, zip(*keys, strict=True)))

    def at(self, numbers: Tensor) -> Keys:
        """Return the keys of some blocks."""
        return Keys(self.keys[numbers], self.rows[numbers])

    def on(self, device: torch.device) -> Keys:
        """Return them on another device; the host does not wait for the copy."""
        return Keys(copied_to(device, self.keys), copied_to(device, self.rows))


class Noise(NamedTuple):
    """The numbers of one step, rank and hop, for k blocks of n elements."""

    numbers: Tensor
    """The table of 16-bit patterns: int16 [R, n], on the CPU."""
    parts: Tensor
    """The table in parts of 1, fp32, on the blocks' device: the middles of intervals of 2**-16."""
    rows: Tensor
    """int32 [k]: each block's row of the table."""
    shifts: Tensor
    """int64 [k], of 16 bits: the number that each block adds to its row, modulo 2**16."""

    @classmethod
    def of(cls, keys: Keys, width: int, table_seed: int, shift_seed: int) -> Self:
        """Return the numbers of the blocks with these keys, of `width` elements."""
        numbers, parts = map(torch.from_numpy, _table(table_seed, width))
        # Both have 63 random bits, and so has the sum of which the upper 16 are taken: int64 drops what is beyond.
        factor, summand = stable_seed("factor", shift_seed), stable_seed("summand", shift_seed)
        shifts = keys.keys.mul(factor).add_(summand).bitwise_right_shift_(47).bitwise_and_(0xFFFF)
        return cls(numbers, copied_to(keys.rows.device, parts), keys.rows, shifts)

    def at(self, blocks: slice) -> Self:
        """Return the numbers of some blocks."""
        return self._replace(rows=self.rows[blocks], shifts=self.shifts[blocks])

    def split(self, sizes: Sequence[int]) -> Iterator[Self]:
        """Yield the numbers in pieces of `sizes` blocks."""
        for rows, shifts in zip(self.rows.split(sizes), self.shifts.split(sizes), strict=True):
            yield type(self)(self.numbers, self.parts, rows, shifts)

    def uniform(self) -> Tensor:
        """Return them, [k, n], in fp32: odd multiples of 2**-17 between 0 and 1."""
        return self.parts.index_select(0, self.rows).add_(self.shifts.unsqueeze(1), alpha=2.0**-16).frac_()


def _rows(width: int) -> int:
    return max(1, _NUMBERS // width)


@functools.lru_cache(maxsize=4)
def _table(seed: int, width: int) -> tuple[numpy.ndarray[Any, Any], numpy.ndarray[Any, Any]]:
    """Return a table of 16-bit numbers [R, width], and the middles of their intervals as parts of 1, in fp32."""
    drawn = numpy.random.Generator(numpy.random.SFC64(seed)).integers(0, 1 << 16, (_rows(width), width), numpy.uint16)
    return drawn.view(numpy.int16), (drawn.astype(numpy.float32) + numpy.float32(0.5)) * numpy.float32(2.0**-16)
