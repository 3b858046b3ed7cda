"""Functions of `commhooks.compressors.kernels` have equal bits in their eager form and, at any level, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks.compressors.kernels import selection, sums
from commhooks.compressors.sparse.indices import InBlocks
from commhooks.compressors.tiles import TiledParameter, TiledPiece, Tiling
from commhooks.native import library
from commhooks.packing import pack_integers
from tests import bounds

BUILT = library.opened(library.PATH)
LEVELS = () if isinstance(BUILT, str) else library.levels_of(BUILT)
DTYPES = [
    torch.float32,
    torch.float64,
]  # those that compressors compute in; there are no compiled passes for the second
SIZES = (1, 7, 100, 4096, 5000, 25_000)
RANKS = 3


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return numbers of different magnitudes and both signs: of equal ones, either form may choose others."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(torch.Size(shape).numel(), generator=generator).to(dtype).add_(0.5)
    signs = torch.randint(0, 2, numbers.shape, generator=generator) * 2 - 1
    return (numbers * signs * 1.25).view(shape)


def largest(n: int, dtype: torch.dtype) -> list[Tensor]:
    return [selection.largest(drawn(5, n, dtype=dtype), k).sort(dim=1).values.long() for k in {1, -(-n // 9), n}]


def largest_of_tiles(n: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the values found: all padding is alike."""
    found = []
    for tiling in (Tiling.of(torch.empty(shape), 16) for shape in ((n,), (n, 3), (3, n), (2, n, 2))):
        memory = drawn(tiling.elements, dtype=dtype)
        for k in {1, tiling.a * tiling.b // 2 or 1}:
            places = selection.largest_of_tiles(tiling, memory, k).long()
            found.append(tiling.cut(memory).flatten(1).gather(1, places).abs().sort(dim=1).values)
    return found


def bins(n: int, dtype: torch.dtype) -> list[Tensor]:
    return [selection.four_bins(drawn(n, dtype=dtype) * scale)[0] for scale in (1e-30, 1.0, 1e30)]


def mean_of_blocks(n: int, dtype: torch.dtype) -> list[Tensor]:
    found, generator = [], torch.Generator().manual_seed(n)
    for bits in (12, 16):
        coding = InBlocks((n, 3 * n), 0.1, bits=bits)
        blocks = [of for number in range(2) for of in coding.blocks(number)]
        sizes = [of.block for of in blocks for _ in range((of.memory.stop - of.memory.start) // of.block)]
        own = [
            [torch.randperm(size, generator=generator)[: coding.share(size)] for size in sizes] for _ in range(RANKS)
        ]
        codes = torch.stack([coding.encode(torch.cat(numbers)) for numbers in own])
        values = drawn(RANKS, coding.k, dtype=dtype) * 1e30
        ends = (0, coding.sent(n), coding.k)
        for number, size in enumerate(coding.sizes):
            entries = slice(ends[number], ends[number + 1])
            starts = torch.from_numpy(coding.starts([0, 0]))[entries].int()
            runs = sums.runs_of(coding.shares(number))
            places = sums.SparseEntries(entries, starts, runs, coding.blocks(number, 0, entries.start))
            sent = places, values[:, entries], coding.received(codes)
            found.append(sums.write_mean(torch.full((size,), torch.nan, dtype=dtype), [sent]))
    return found


def sum_of_tiles(n: int, dtype: torch.dtype) -> list[Tensor]:
    tiling, memory = Tiling.of(torch.empty(n, 3), 16), torch.full((3 * n,), torch.nan, dtype=dtype)
    k = -(-tiling.a * tiling.b // 5)
    total = tiling.count * k
    generator = torch.Generator().manual_seed(n)
    places = [
        torch.rand(tiling.count, tiling.a * tiling.b, generator=generator).argsort(1)[:, :k].flatten()
        for _ in range(RANKS)
    ]
    of_bins = [torch.randint(0, 4, (total,), generator=generator) for _ in range(RANKS)]
    packed, bins = (
        sums.PackedNumbers(torch.stack([pack_integers(own, bits) for own in of_ranks]), bits, total)
        for of_ranks, bits in ((places, 8), (of_bins, 2))
    )
    geometry = tiling, k, tiling.starts(torch.int32), tiling.sides(torch.int32), slice(0, 3 * n), slice(0, total)
    nothing: Any = None  # neither its slot nor its tile is asked for
    piece = TiledPiece(
        nothing, [TiledParameter(nothing, 0, *geometry)], slice(0, total), sums.runs_of([k] * tiling.count)
    )
    return [sums.write_sum_of_tiles(memory, piece, drawn(RANKS, 1, 4, dtype=dtype), packed, bins)]


FUNCTIONS: list[Callable[[int, torch.dtype], list[Tensor]]] = [
    largest, largest_of_tiles, bins, mean_of_blocks, sum_of_tiles
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_both_forms_of_a_function_have_equal_bits(
    function: Callable[[int, torch.dtype], list[Tensor]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in SIZES:
        monkeypatch.setenv(library.VARIABLE, "off")
        eager = function(n, dtype)
        for level in LEVELS:
            monkeypatch.setenv(library.VARIABLE, level)
            for own, expected in zip(function(n, dtype), eager, strict=True):
                assert torch.equal(own, expected.to(own.dtype)), (n, level)


def test_means_of_bins_are_within_the_rounding_of_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code adds them up in double."""
    for n in SIZES:
        found, values = [], drawn(n, dtype=torch.float32)
        for level in ("off", *LEVELS):
            monkeypatch.setenv(library.VARIABLE, level)
            found.append(selection.four_bins(values)[1])
        for own in found[1:]:
            assert torch.equal(own, found[1]), "at every level"
            torch.testing.assert_close(own, found[0], rtol=n * bounds.unit_roundoff(torch.float32), atol=0)
