"""The compiled search for the largest elements of blocks and tiles, and the sums of the elements that ranks have sent.

All is in fp32, on a CPU. The results are the same at every level. Among equal magnitudes, eager code may choose other
elements.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import NamedTuple, Self

import torch
from torch import Tensor

from commhooks.errors import CompressorError
from commhooks.native import library
from commhooks.native.passes import over_threads, unsuited

MOST = 1 << 16
"""The most elements of a block or a tile: their maxima then stay in the second cache."""
_GRID, _PACKED = "9q", "P4q"
_LARGEST = struct.Struct("qqPP")
_TAKE = struct.Struct("qqPPPPd")
_SUM = struct.Struct(f"qqPq{_PACKED}Pq")
_LARGEST_OF_TILES = struct.Struct(f"{_GRID}PP")
_BINS = struct.Struct("PPP")
_SUM_OF_TILES = struct.Struct(f"{_GRID}Pq{_PACKED}{_PACKED}Pq")
"""The structs in largest.h."""


class Grid(NamedTuple):
    """Tiles a×b over a matrix n×m, of which 1-D memory has the first `elements`; the others are padding."""

    a: int
    b: int
    across: int
    """The number of tiles horizontally."""
    n: int
    m: int
    down: int
    """The distance in memory of two neighbours in a column; `right`: in a row."""
    right: int
    elements: int
    k: int
    """The number of elements sent of each tile."""

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return self.across * -(-self.n // self.a)


class Packed(NamedTuple):
    """Numbers that `commhooks.packing` has packed, and the first one that counts."""

    codes: Tensor
    """[W, bytes], uint8."""
    bits: int
    total: int
    """The number of packed values of each rank."""
    first: int


@dataclasses.dataclass(frozen=True)
class SparseKernels:
    """The functions at one level.

    They raise `CompressorError` for tensors that are not as they say, before anything is written, and for places beyond
    a block, when some of the blocks may have been changed.
    """

    level: str

    @classmethod
    def chosen(cls, memory: Tensor) -> Self | None:
        """Return the functions to use for this memory, or None if everything runs eagerly.

        Raises `SettingsError` as `commhooks.native.compiled` does.
        """
        if type(memory) is not Tensor or not memory.is_cpu or memory.dtype is not torch.float32:
            return None
        level = library.chosen()
        return None if level is None else cls(level)

    def largest(self, blocks: Tensor, k: int) -> Tensor:
        """Return the places, int32 [B, k], of the k largest elements of blocks [B, n]; n is at most `MOST`.

        NaN counts as largest.
        """
        count, n = blocks.shape
        if not 0 < k <= n <= MOST or blocks.dtype is not torch.float32 or not blocks.is_contiguous():
            raise unsuited("blocks", blocks, f"[B, n], contiguous, of torch.float32, with {k} to {MOST} elements each")
        places = blocks.new_empty((count, k), dtype=torch.int32)
        self._run("largest", count, n, _LARGEST.pack(n, k, blocks.data_ptr(), places.data_ptr()))
        return places

    def take(self, blocks: Tensor, k: int, residual: Tensor | None, least: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return the places, int32 [B, k], and the values of the k largest elements of blocks [B, n].

        Values below `least` are returned as zeros. A residual [B, n] is added first and becomes what the values leave
        out, and the blocks become what it was. Places are those that `largest` finds in the sums.
        """
        count, n = blocks.shape
        for memory, name in ((blocks, "blocks"), (residual, "the residual")):
            if memory is not None and (
                not 0 < k <= n <= MOST
                or memory.shape != blocks.shape
                or memory.dtype is not torch.float32
                or not (memory.is_cpu and memory.is_contiguous())
            ):
                wanted = f"[B, n], contiguous, of torch.float32, with {k} to {MOST} elements each"
                raise unsuited(name, memory, wanted)
        places, values = blocks.new_empty((count, k), dtype=torch.int32), blocks.new_empty((count, k))
        addresses = [0 if one is None else one.data_ptr() for one in (blocks, residual, places, values)]
        self._run("take", count, n, _TAKE.pack(n, k, *addresses, least))
        return places, values

    def sum(self, blocks: Tensor, places: Packed, values: Tensor) -> None:
        """Overwrite blocks [B, n] with the sums, in rank order, of values [W, B·k] at their places, divided by W."""
        count, n = blocks.shape
        ranks, entries = values.shape
        if blocks.dtype is not torch.float32 or not blocks.is_contiguous() or not 0 < n <= MOST or entries % count:
            raise unsuited("blocks", blocks, f"[B, n], contiguous, of torch.float32, for {entries} entries")
        of_values = _matrix("values", values, torch.float32, ranks, entries)
        to = n, entries // count, blocks.data_ptr(), ranks
        self._run("sum", count, n, _SUM.pack(*to, *_codes(places, ranks, entries), *of_values))

    def largest_of_tiles(self, grid: Grid, memory: Tensor) -> Tensor:
        """Return the places, int32 [T, k], of the k largest elements of each tile of 1-D memory.

        Tiles have at most `MOST` elements. NaN counts as largest, and padding as zero.
        """
        _check(grid, memory)
        places = memory.new_empty((grid.tiles, grid.k), dtype=torch.int32)
        packed = _LARGEST_OF_TILES.pack(*grid, memory.data_ptr(), places.data_ptr())
        self._run("largest_of_tiles", grid.tiles, grid.a * grid.b, packed)
        return places

    def bins(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bins, int32 [n], of values [n], and the mean of each of the four bins.

        A bin is 1 if the magnitude is above the mean magnitude, plus 2 if the value is negative. Sums are in double.
        """
        if values.dtype is not torch.float32 or values.dim() != 1 or not values.is_contiguous() or not len(values):
            raise unsuited("values", values, "[n], contiguous, of torch.float32")
        bins, means = torch.empty_like(values, dtype=torch.int32), values.new_empty(4)
        self._run("bins", len(values), 0, _BINS.pack(values.data_ptr(), bins.data_ptr(), means.data_ptr()))
        return bins, means

    def sum_of_tiles(self, grid: Grid, memory: Tensor, places: Packed, bins: Packed, means: Tensor) -> None:
        """Overwrite 1-D memory with the sums, in rank order, of the means [W, 4] at the places of their bins."""
        _check(grid, memory)
        ranks, entries = len(means), grid.tiles * grid.k
        if (bins.bits, bins.total, bins.first) != (2, places.total, places.first):
            raise CompressorError(f"compiled sums of tiles need a bin of 2 bits for each place (got {bins}, {places}).")
        codes = *_codes(places, ranks, entries), *_codes(bins, ranks, entries)
        to = memory.data_ptr(), ranks, *codes, *_matrix("means", means, torch.float32, ranks, 4)
        self._run("sum_of_tiles", grid.tiles, grid.a * grid.b, _SUM_OF_TILES.pack(*grid, *to))

    def _run(self, name: str, count: int, elements: int, packed: bytes) -> None:
        worst, _ = over_threads(name, self.level, count, elements, packed)
        if worst == -1:
            raise MemoryError(f"a search in {elements} elements")
        if worst < 0:
            raise CompressorError("a rank has sent a place that is beyond its block: its message is damaged.")


def _check(grid: Grid, memory: Tensor) -> None:
    if memory.dtype is not torch.float32 or memory.shape != (grid.elements,) or not memory.is_contiguous():
        raise unsuited("memory", memory, f"[{grid.elements}], contiguous, of torch.float32")
    if not 0 < grid.k <= grid.a * grid.b <= MOST or grid.n * grid.m < grid.elements:
        raise CompressorError(f"compiled searches need tiles of {grid.k} to {MOST} elements (got {grid}).")


def _codes(packed: Packed, ranks: int, entries: int) -> tuple[int, int, int, int, int]:
    """Return the arguments for C; raise `CompressorError` unless `entries` numbers follow from the first one on."""
    if not (0 < packed.bits < 31 and 0 <= packed.first <= packed.total - entries):
        raise CompressorError(f"there are no {entries} numbers from {packed.first} on among {packed.total}.")
    of_runs = (-(-packed.total * width // 8) for width in (4, 2, 1) if packed.bits & width)
    codes = _matrix("codes", packed.codes, torch.uint8, ranks, packed.total * (packed.bits // 8) + sum(of_runs))
    return *codes, packed.bits, packed.total, packed.first


def _matrix(name: str, rows: Tensor, dtype: torch.dtype, ranks: int, width: int) -> tuple[int, int]:
    """Return the address of rows [W, width], and the elements from one to the next."""
    is_row = width <= 1 or rows.stride(-1) == 1
    if rows.dtype is not dtype or not rows.is_cpu or rows.shape != (ranks, width) or not is_row:
        raise unsuited(name, rows, f"[{ranks}, {width}], of {dtype}")
    return rows.data_ptr(), rows.stride(0)
