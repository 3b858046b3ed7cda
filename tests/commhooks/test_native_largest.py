"""Compiled searches and sums: each level that this processor has, against PyTorch's, and against eager compressors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from commhooks import make_compressor
from commhooks.compressors.kernels.sums import add_in_rank_order
from commhooks.compressors.tiles import Tiling
from commhooks.errors import CompressorError
from commhooks.native import library
from commhooks.native.largest import MOST, Packed, SparseKernels
from commhooks.packing import pack_integers, packed_bytes
from tests.commhooks.workers import Workers, normal, zeros
from tests.tiers import A_ROW

BUILT = library.opened(library.PATH)
LEVELS = () if isinstance(BUILT, str) else library.levels_of(BUILT)
pytestmark = pytest.mark.skipif(isinstance(BUILT, str), reason=f"compiled passes: {BUILT}")
every_level = pytest.mark.parametrize("level", LEVELS)
HARD: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "heavy-tailed": lambda x: x**9,
    "all equal": torch.ones_like,
    "zero": torch.zeros_like,
    "of two values": lambda x: torch.where(x > 1, -2.0, 1.0),
    "one huge": lambda x: torch.ones_like(x).index_fill_(1, torch.tensor(x.shape[1] // 2), 3e38),
    "denormal": lambda x: x * 1e-42,
    "from the smallest to the largest": lambda x: 10 ** (x * 12),
    "of changing scales": lambda x: x * (10.0 ** (torch.arange(len(x)) % 2 * 60 - 30)).unsqueeze(1),
    "with infinities": lambda x: torch.where(x.abs() > 1.5, math.inf * x, x),
    "with NaN of either sign": lambda x: torch.where(x.abs() > 1.5, math.nan * x, x),
}
"""Blocks from normally distributed ones."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_largest(rows: Tensor, places: Tensor, k: int) -> None:
    """Assert that places [B, k] differ and have the magnitudes of the k largest; NaN is the largest."""
    assert all(len(set(row)) == k for row in places.tolist())
    ours = rows.abs().gather(1, places.long()).sort(descending=True).values
    assert torch.equal(ours.nan_to_num(nan=-1.0), torch.topk(rows.abs(), k).values.nan_to_num(nan=-1.0))


@every_level
@pytest.mark.parametrize("kind", HARD)
def test_the_values_of_the_largest_are_those_of_top_k(level: str, kind: str) -> None:
    sizes = ((1, 1), (2, 1), (3, 3), (17, 1), (17, 5), (100, 50), (1000, 999), (4096, 41), (4099, 410), (MOST, 656))
    for n, k in sizes:
        rows = HARD[kind](drawn(5, n, seed=n))
        assert_largest(rows, SparseKernels(level).largest(rows, k), k)


def test_all_levels_find_the_same_also_of_equal_magnitudes() -> None:
    for kind in HARD.values():
        rows = kind(drawn(9, 4096))
        first, *others = [SparseKernels(level).largest(rows, 64) for level in LEVELS]
        alone = torch.cat([SparseKernels(LEVELS[0]).largest(row.unsqueeze(0), 64) for row in rows])
        assert all(torch.equal(first, other) for other in (*others, alone)), "whatever the block before was"


@every_level
def test_what_is_taken_of_a_sum_with_a_residual_is_not_left_in_it(level: str) -> None:
    kernels, x, e = SparseKernels(level), drawn(9, 4096, seed=1), drawn(9, 4096, seed=2)
    e[:, 0] = math.nan
    for least, k in ((0.0, 41), (2.5, 100)):
        places = kernels.largest(x + e, k)
        values = (x + e).gather(1, places.long())
        is_small = values.abs() < least
        left = (x + e).scatter(1, places.long(), torch.where(is_small, values, 0.0))
        blocks, residual = x.clone(), e.clone()
        taken = kernels.take(blocks, k, residual, least)
        expected = (places, values.masked_fill(is_small, 0.0), e, left)
        assert all(
            map(functools.partial(torch.allclose, rtol=0, atol=0, equal_nan=True), (*taken, blocks, residual), expected)
        )
        alone = kernels.take(x + e, k, None, least)
        assert all(map(functools.partial(torch.allclose, rtol=0, atol=0, equal_nan=True), alone, taken))
    with pytest.raises(CompressorError, match="the residual on a CPU"):
        kernels.take(x, 41, e[:3])


@every_level
@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("shape", [(40, 36), (17, 33), (7,), (), (20, 3, 4, 2), (100, 1)], ids=str)
def test_the_largest_of_tiles_are_those_of_the_tiles_cut_out(level: str, shape: tuple[int, ...], order: str) -> None:
    parameter = torch.zeros(shape)
    if order == "columns" and len(shape) > 1:
        parameter = parameter.mT.contiguous().mT
    tiling, memory = Tiling.of(parameter, 16), drawn(parameter.numel())
    k = min(5, tiling.a * tiling.b)
    assert_largest(tiling.cut(memory).flatten(1), SparseKernels(level).largest_of_tiles(tiling.sending(k), memory), k)


def rows_of(numbers: Tensor, bits: int) -> Tensor:
    """Return the codes [W, bytes] of numbers [W, n], as part of a wider message."""
    message = torch.zeros(len(numbers), packed_bytes(numbers.shape[1], bits) + 3, dtype=torch.uint8)
    message[:, 3:] = torch.stack([pack_integers(own, bits) for own in numbers])
    return message[:, 3:]


@every_level
@pytest.mark.parametrize("bits", [12, 16])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_sums_have_the_bits_of_eager_ones(level: str, bits: int, ranks: int) -> None:
    n, blocks, k, before, after = 1000, 7, 50, 13, 4
    places = torch.stack([torch.rand(blocks, n).argsort(1)[:, :k] for _ in range(ranks)])  # W×B×k
    numbers = torch.zeros(ranks, before + blocks * k + after, dtype=torch.int64)
    numbers[:, before : before + blocks * k] = places.flatten(1)
    values = drawn(ranks, blocks * k) * 1e30
    expected = torch.zeros(blocks * n)
    at = (places + torch.arange(0, blocks * n, n).view(-1, 1)).flatten(1)
    add_in_rank_order(expected, at, values / ranks, [blocks * k])
    summed = torch.full((blocks, n), math.nan)
    SparseKernels(level).sum(summed, Packed(rows_of(numbers, bits), bits, numbers.shape[1], before), values)
    assert torch.equal(summed.flatten(), expected)


@every_level
def test_a_place_beyond_its_block_is_an_error_and_changes_no_other_memory(level: str) -> None:
    memory = torch.full((3, 100), 7.0)
    codes = Packed(rows_of(torch.tensor([[5, 200]]), 12), 12, 2, 0)
    with pytest.raises(CompressorError, match="beyond its block: its message is damaged"):
        SparseKernels(level).sum(memory[1:2], codes, torch.ones(1, 2))
    grid = Tiling.of(torch.zeros(10, 10), 16).sending(2)
    bins = Packed(rows_of(torch.tensor([[1, 2]]), 2), 2, 2, 0)
    with pytest.raises(CompressorError, match="beyond its block"):
        SparseKernels(level).sum_of_tiles(grid, memory[1], codes, bins, torch.ones(1, 4))
    assert (memory[::2] == 7).all()


def test_tensors_that_are_not_as_the_functions_need_them_are_errors() -> None:
    selection, blocks = SparseKernels(LEVELS[0]), drawn(4, 100)
    grid = Tiling.of(torch.zeros(20, 20), 16).sending(3)
    codes = Packed(rows_of(torch.zeros(2, 40, dtype=torch.int64), 12), 12, 40, 0)
    wrong: list[Callable[[], object]] = [
        lambda: selection.largest(blocks, 0),
        lambda: selection.largest(blocks, 101),
        lambda: selection.largest(blocks.double(), 3),
        lambda: selection.largest(blocks.T, 3),
        lambda: selection.largest(torch.zeros(1, MOST + 1), 3),
        lambda: selection.largest_of_tiles(grid, drawn(399)),
        lambda: selection.largest_of_tiles(grid._replace(k=101), drawn(400)),
        lambda: selection.bins(drawn(0)),
        lambda: selection.sum(blocks, codes, drawn(2, 41)),
        lambda: selection.sum(blocks, codes, drawn(3, 40)),
        lambda: selection.sum(blocks, codes._replace(first=1), drawn(2, 40)),
        lambda: selection.sum(blocks, codes._replace(total=41), drawn(2, 40)),
        lambda: selection.sum(blocks, codes._replace(codes=codes.codes.int()), drawn(2, 40)),
        lambda: selection.sum_of_tiles(grid, drawn(400), codes, codes, drawn(2, 4)),
        lambda: selection.sum_of_tiles(grid, drawn(400), codes, codes._replace(bits=2), drawn(2, 4)),
    ]
    for call in wrong:
        with pytest.raises(CompressorError, match="compiled|numbers"):
            call()


SHAPES = ((300, 200), (70_000,), (64, 24, 3, 3), (33,), (), (129, 65))
HOOKS = [
    "top-k",
    "top-k:ratio=0.2",
    "top-k:indices=block-16",
    "dgc",
    "threshold:threshold=1.5",
    "sparse-loco",
    "sparse-loco:k=8,chunk=16,clip_to_median=True",
    "sparse-loco:mean_over=senders",
]


@pytest.mark.parametrize("hook", HOOKS)
def test_means_and_residuals_are_those_of_eager_steps(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, but for the means of SparseLoCo's bins, which are sums in another order: within n·ε of the mean."""
    ranks, results = 3, []
    for word in ("off", LEVELS[0], LEVELS[-1]):
        monkeypatch.setenv(library.VARIABLE, word)
        workers = Workers(make_compressor(hook), ranks, zeros(*SHAPES))
        means = workers.step(normal(workers.parameters, ranks, seed=1))
        assert all(torch.equal(own, other) for own, other in zip(means[0], means[2], strict=True))
        left = [workers.residual(rank, number) for rank in range(ranks) for number in range(len(SHAPES))]
        results.append([*means[0], *left])
    eager, *compiled = results
    for own, other, expected in zip(*compiled, eager, strict=True):
        assert torch.equal(own, other), "at every level"
        rounding = own.numel() * 2.0**-23 if hook.startswith("sparse-loco") else 0.0
        torch.testing.assert_close(own, expected, rtol=0, atol=rounding * float(expected.abs().max()))


@A_ROW
def test_one_rank_may_be_compiled_and_another_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sends in its own form, and all decode all that is sent to the same bits, in 20 steps."""
    for hook in ("top-k", "sparse-loco"):
        workers = Workers(make_compressor(hook), 3, zeros(*SHAPES))
        chosen = iter(range(10**6))
        monkeypatch.setattr(library, "chosen", lambda turns=chosen: (None, LEVELS[0], LEVELS[-1])[next(turns) % 3])
        for step in range(20):
            means = workers.step(normal(workers.parameters, 3, seed=step))
            for other in means[1:]:
                assert all(torch.equal(own, expected) for own, expected in zip(other, means[0], strict=True))
