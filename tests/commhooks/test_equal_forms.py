"""Sums of tiles and bins have equal bits eagerly and, at any level, compiled; others are in test_native_largest.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks.compressors.kernels import selection, sums
from commhooks.compressors.tiles import TiledParameter, TiledPiece, Tiling
from commhooks.native import library
from commhooks.packing import pack_integers
from tests import bounds

BUILT = library.opened(library.PATH)
LEVELS = () if isinstance(BUILT, str) else library.levels_of(BUILT)
SIZES = (1, 7, 100, 4096, 5000, 25_000)
RANKS = 3


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return numbers of different magnitudes and both signs: of equal ones, either form may choose others."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(torch.Size(shape).numel(), generator=generator).to(dtype).add_(0.5)
    signs = torch.randint(0, 2, numbers.shape, generator=generator) * 2 - 1
    return (numbers * signs * 1.25).view(shape)


def bins(n: int, dtype: torch.dtype) -> list[Tensor]:
    return [selection.four_bins(drawn(n, dtype=dtype) * scale)[0] for scale in (1e-30, 1.0, 1e30)]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("function", [bins, sum_of_tiles], ids=lambda function: function.__name__)
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
