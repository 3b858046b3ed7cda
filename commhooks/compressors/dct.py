"""The discrete cosine transform of tiles: the orthonormal DCT-II along both sides.

A rank's own coefficients are products of matrices, whose last bits depend on the processor. What all ranks must have
alike, their bases and the inverse transform of all coefficients, is made of single operations in a fixed order.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from commhooks.compressors.powersgd.precision import in_full
from commhooks.devices import copied_to, runs_later

_TILES_AT_ONCE = 64
"""The number of tiles to transform at a time in a fixed order, so that temporaries stay in the processor's cache."""


def cosines(n: int, like: Tensor) -> Tensor:
    """Return the orthonormal basis n×n, one frequency per row, with the dtype and device of `like`."""
    return copied_to(like.device, torch.from_numpy(_basis(n)).to(like.dtype))


def shrinking(n: int) -> float:
    """Return the largest power of two that is at most 1/√n: no coefficient of a basis times it overflows."""
    return 2.0 ** -math.ceil(math.log2(n) / 2)


def transform(tiles: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return left · tile · rightᵀ for tiles [T, a, b]: their DCT, or its inverse if the bases are transposed."""
    return _across(_across(tiles, right), left)


def inverse_alike(C: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return leftᵀ · C · right for coefficients [T, a, b], with the same bits on every processor.

    On a CPU it takes three to six times as long as `transform`.
    """
    if runs_later(C):
        return transform(C, left.t(), right.t())
    tiles = torch.empty_like(C)
    for some, own in zip(C.split(_TILES_AT_ONCE), tiles.split(_TILES_AT_ONCE), strict=True):
        columns = _inverse(some.permute(1, 2, 0).contiguous(), left)  # a×b×T: neighbours in memory are alike
        own.copy_(_inverse(columns.transpose(0, 1), right).permute(2, 1, 0))
    return tiles


def _across(tiles: Tensor, basis: Tensor) -> Tensor:
    """Return tile · basisᵀ, transposed: T×a×b becomes T×b×a."""
    T, a, b = tiles.shape
    P, Q = in_full(tiles.reshape(T * a, b), basis.t())  # what a narrower product would round away is kept nowhere
    return (P @ Q).view(T, a, b).transpose(1, 2)


def _inverse(C: Tensor, basis: Tensor) -> Tensor:
    """Return the inverse transform along the first dimension: basisᵀ · C, for a basis with one frequency per row.

    Even frequencies are symmetric about the middle, and odd ones antisymmetric, so half of each is computed. The even
    ones' halves are themselves those of an inverse transform, half as long.
    """
    n = len(C)
    if n % 2:
        return _sum_of_frequencies(C, basis)
    half = basis[:, : n // 2]
    even, odd = _inverse(C[::2], half[::2]), _sum_of_frequencies(C[1::2], half[1::2])
    return torch.cat([even + odd, even.sub_(odd).flip(0)])


def _sum_of_frequencies(C: Tensor, basis: Tensor) -> Tensor:
    """Return basisᵀ · C, added up from the first frequency to the last."""
    first, *others = zip(basis[..., None, None], C, strict=True)
    total = torch.mul(*first)
    room = torch.empty_like(total)
    for waves, own in others:
        total.add_(torch.mul(waves, own, out=room))
    return total


@functools.cache
def _basis(n: int) -> NDArray[np.float64]:
    """Return the basis in fp64."""
    quarter = [_cosine(math.pi / (2 * n) * place) for place in range(n)] + [0.0]
    half = quarter + [-one for one in quarter[-2::-1]]  # up to π
    rows = [[half[min(turn, 4 * n - turn)] for turn in (f * (2 * k + 1) % (4 * n) for k in range(n))] for f in range(n)]
    basis = np.array(rows) * math.sqrt(2 / n)
    basis[0] = math.sqrt(1 / n)
    return basis


def _cosine(x: float) -> float:
    """Return cos x, for x from 0 to π/2, to 2e-16: the libraries' own depend on the processor in the last bit."""
    total = 1.0
    for k in range(26, 0, -2):
        total = 1.0 - x * x / (k * (k - 1)) * total
    return total
