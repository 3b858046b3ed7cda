"""SparseLoCo and DeMo: against references of a few lines of NumPy, written from the papers, and in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor

from commhooks import Compressor, ErrorFeedback, make_compressor
from commhooks.compressors import DeMo, SparseLoCo
from commhooks.compressors.tiles import MeanOver, Tiling
from commhooks.packing import pack_integers, packed_bytes, unpack_integers
from tests.bounds import IN_FLOAT64
from tests.commhooks.workers import Workers, normal, zeros
from tests.flat_cost import RESNET18, Shapes, traffic_of
from tests.tiers import A_ROW, rows, thorough

pytestmark = pytest.mark.kernels

Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]


# --- tiles and bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "tiles", "a", "b"),
    [
        ((128, 192), 6, 64, 64),
        ((65, 130), 6, 33, 44),  # as even as possible
        ((64, 64, 3, 3), 9, 64, 64),
        ((10, 512), 2, 40, 64),  # too narrow: 80 rows of 64
        ((512,), 1, 8, 64),
        ((100,), 1, 2, 50),
        ((), 1, 1, 1),
    ],
    ids=str,
)
def test_a_parameter_is_cut_into_few_tiles_that_are_alike(shape: tuple[int, ...], tiles: int, a: int, b: int) -> None:
    tiling = Tiling.of(torch.zeros(shape), 64)
    assert (tiling.count, tiling.a, tiling.b) == (tiles, a, b)


@pytest.mark.parametrize("shape", [(40, 36), (17, 33), (7,), (), (20, 3, 4, 2), (100, 1)], ids=str)
@pytest.mark.parametrize("order", ["rows", "columns"])
def test_tiles_are_joined_as_they_were_cut(shape: tuple[int, ...], order: str) -> None:
    parameter = torch.zeros(shape)
    if order == "columns":
        parameter = parameter.mT.contiguous().mT if len(shape) > 1 else parameter
    memory = torch.randn(parameter.numel(), generator=torch.Generator().manual_seed(1))
    tiling = Tiling.of(parameter, 16)
    tiles = tiling.cut(memory)
    assert tiles.shape == (tiling.count, tiling.a, tiling.b)
    assert max(tiling.a, tiling.b) <= 16
    assert torch.equal(tiling.join(tiles), memory)
    assert torch.equal(torch.cat(list(tiling.bands(memory, 1))), tiles)
    everywhere = torch.arange(tiling.a * tiling.b, dtype=torch.int32).expand(tiling.count, -1)
    indices = tiling.indices(everywhere, 7 + tiling.starts(torch.int32), tiling.sides(torch.int32))  # it begins at 7
    assert torch.equal(torch.where(indices < 0, 0.0, memory[indices - 7]), tiles.flatten(1))
    assert sorted(indices[indices >= 0].tolist()) == list(range(7, 7 + parameter.numel()))
    assert tiles.data_ptr() != memory.data_ptr()
    assert tiles.count_nonzero() == memory.count_nonzero()  # what is more is padding


@pytest.mark.parametrize("bits", [1, 2, 3, 8, 12, 15, 20])
@pytest.mark.parametrize("shape", [(3, 5), (16,), (1,)], ids=str)
def test_packed_numbers_come_back_from_as_few_bytes_as_their_runs_need(bits: int, shape: tuple[int, ...]) -> None:
    numbers = torch.randint(0, 2**bits, (2, *shape), generator=torch.Generator().manual_seed(bits))
    packed = torch.stack([pack_integers(own, bits) for own in numbers])
    assert packed.dtype == torch.uint8 and packed.shape == (2, packed_bytes(math.prod(shape), bits))
    runs = bits // 8 + (bits % 8).bit_count()  # each in whole bytes
    assert 0 <= packed.shape[1] - math.ceil(math.prod(shape) * bits / 8) < runs
    assert torch.equal(unpack_integers(packed, bits, shape), numbers.int())


# --- references -------------------------------------------------------------------------------------------------------


def sparse_loco(matrix: Matrix, side: int, k: int) -> Matrix:
    """Return what one rank sends of a matrix whose sides are multiples of the tile's."""
    places = np.zeros(matrix.shape, dtype=bool)
    for i in range(0, matrix.shape[0], side):
        for j in range(0, matrix.shape[1], side):
            tile = np.abs(matrix[i : i + side, j : j + side])
            places[i : i + side, j : j + side] = tile >= np.sort(tile, axis=None)[-k]
    large = np.abs(matrix) > np.abs(matrix[places]).mean()
    sent = np.zeros_like(matrix)
    for own in (places & large & (matrix > 0), places & large & (matrix < 0)):
        sent[own] = matrix[own].mean() if own.any() else 0
    for own in (places & ~large & (matrix > 0), places & ~large & (matrix < 0)):
        sent[own] = matrix[own].mean() if own.any() else 0
    return sent


def mean(sent: Sequence[Matrix], over: MeanOver) -> Matrix:
    """Return the mean of what ranks have sent, over all of them or over those that sent something else than zero."""
    numbers = np.maximum(np.sum([own != 0 for own in sent], axis=0), 1)
    return np.asarray(sum(sent) / (len(sent) if over == "ranks" else numbers))


over_whom = pytest.mark.parametrize("over", get_args(MeanOver))


@over_whom
@pytest.mark.parametrize("seed", [0, *rows([1, 2]), *thorough(range(3, 10))])
def test_sparse_loco_is_what_its_paper_says(seed: int, over: MeanOver) -> None:
    compressor = ErrorFeedback(inner=SparseLoCo(k=12, chunk=16, mean_over=over), decay=0.95)
    workers = Workers(compressor, 3, zeros((32, 48), dtype=torch.float64))
    residuals = [np.zeros((32, 48)) for _ in range(3)]
    for step in range(3):
        gradients = normal(workers.parameters, 3, seed=100 * seed + step)
        to_send = [0.95 * r + g[0].numpy() for r, g in zip(residuals, gradients, strict=True)]
        sent = [sparse_loco(own, 16, 12) for own in to_send]
        residuals = [own - part for own, part in zip(to_send, sent, strict=True)]
        assert_close(workers.step(gradients)[1][0], mean(sent, over))
        for rank in range(3):
            assert_close(workers.residual(rank, 0), residuals[rank])


@pytest.mark.parametrize(("lengths", "median"), [((1, 4, 2), 2), ((3, 1), 1), ((1, 5, 2, 4), 2), ((0, 0, 1), 0)])
def test_sparse_loco_clips_what_ranks_have_sent_to_their_median_norm(lengths: tuple[int, ...], median: int) -> None:
    """Of two in the middle, the lower one; the residual is what a rank has not sent, as without clipping."""
    ranks = len(lengths)
    compressor = ErrorFeedback(inner=SparseLoCo(k=12, chunk=16, clip_to_median=True), decay=0.95)
    workers = Workers(compressor, ranks, zeros((32, 48), dtype=torch.float64))
    drawn = [own[0].numpy() for own in normal(workers.parameters, ranks, seed=1)]
    to_send = [
        length * own / np.linalg.norm(sparse_loco(own, 16, 12)) for length, own in zip(lengths, drawn, strict=True)
    ]
    sent = [sparse_loco(own, 16, 12) for own in to_send]
    clipped = [own * min(1, median / max(length, 1)) for length, own in zip(lengths, sent, strict=True)]
    for own in workers.step([[torch.from_numpy(one)] for one in to_send]):
        torch.testing.assert_close(own[0], torch.from_numpy(sum(clipped) / ranks), rtol=0, atol=5 * IN_FLOAT64)
    for rank in range(ranks):
        left = torch.from_numpy(to_send[rank] - sent[rank])
        torch.testing.assert_close(workers.residual(rank, 0), left, rtol=0, atol=5 * IN_FLOAT64)


def extract(momentum: Matrix, side: int, k: int) -> list[list[Matrix]]:
    """Return the transforms of a momentum's tiles, with all but the k largest coefficients of each set to zero."""
    grid = []
    for band in np.vsplit(momentum, momentum.shape[0] // side):
        coefficients = [scipy.fft.dctn(tile, norm="ortho") for tile in np.hsplit(band, momentum.shape[1] // side)]
        grid.append([np.where(np.abs(C) >= np.sort(np.abs(C), axis=None)[-k], C, 0) for C in coefficients])
    return grid


def inverse(grid: list[list[Matrix]]) -> Matrix:
    return np.block([[scipy.fft.idctn(C, norm="ortho") for C in row] for row in grid])


@over_whom
@pytest.mark.parametrize("one_bit", [False, True], ids=["values", "one bit"])
@pytest.mark.parametrize("seed", [0, *rows([1, 2]), *thorough(range(3, 10))])
def test_demo_is_what_its_paper_says(seed: int, one_bit: bool, over: MeanOver) -> None:
    compressor = ErrorFeedback(inner=DeMo(k=12, chunk=16, one_bit=one_bit, mean_over=over), decay=0.999)
    workers = Workers(compressor, 3, zeros((32, 48), dtype=torch.float64))
    momenta = [np.zeros((32, 48)) for _ in range(3)]
    for step in range(3):
        gradients = normal(workers.parameters, 3, seed=100 * seed + step)
        momenta = [0.999 * m + g[0].numpy() for m, g in zip(momenta, gradients, strict=True)]
        extracted = [extract(m, 16, 12) for m in momenta]
        momenta = [m - inverse(own) for m, own in zip(momenta, extracted, strict=True)]
        sent = [[[np.sign(C) if one_bit else C for C in row] for row in own] for own in extracted]
        means = [[mean(of_tile, over) for of_tile in zip(*rows, strict=True)] for rows in zip(*sent, strict=True)]
        assert_close(workers.step(gradients)[1][0], inverse(means))
        for rank in range(3):
            assert_close(workers.residual(rank, 0), momenta[rank])


def assert_close(ours: Tensor, theirs: object) -> None:
    expected = torch.as_tensor(theirs)
    torch.testing.assert_close(ours, expected, rtol=0, atol=IN_FLOAT64 * float(expected.abs().max()))


# --- what a paper promises --------------------------------------------------------------------------------------------


def bytes_per_tile(compressor: Compressor, shapes: Shapes) -> float:
    """Return the bytes that a rank puts in for 4,096 elements."""
    return traffic_of(compressor, shapes, 2).payload_bytes * 4096 / sum(map(math.prod, shapes.values()))


@A_ROW
def test_sparse_loco_sends_112_bytes_for_4096_elements_and_16_for_a_parameter() -> None:
    compressor = make_compressor("sparse-loco")
    assert bytes_per_tile(compressor, {"weight": (64, 64)}) == 112 + 16
    assert bytes_per_tile(compressor, {"weight": (1024, 1024)}) == 112 + 16 / 256
    assert traffic_of(compressor, RESNET18, 2).payload_bytes == 310_916
    assert round(bytes_per_tile(compressor, RESNET18), 1) == 114.0


def test_distro_sends_eight_and_a_half_bytes_for_4096_elements_and_a_number_for_a_bucket() -> None:
    """Four places of 2 bytes and four bits; two tiles share a byte of bits, and rows end at multiples of 4 bytes."""
    distro, verdict = make_compressor("distro"), 4
    assert traffic_of(distro, {"weight": (1024, 1024)}, 2).payload_bytes == 256 * 8.5 + verdict
    bits = 23  # half bytes that 46 parameters of an odd number of tiles do not use
    tiles = 2768  # 2,724 whole ones, 2 of the 10×512 layer, 1 each of 42 small parameters
    unpadded = tiles * 8.5 + bits + verdict
    assert traffic_of(distro, RESNET18, 2).payload_bytes == math.ceil(unpadded / 4) * 4 == 23_556
    assert bytes_per_tile(distro, RESNET18) < 8.65
