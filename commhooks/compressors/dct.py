"""The discrete cosine transform of tiles: the orthonormal DCT-II along both sides, as matrix products."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from commhooks.compressors.powersgd.precision import in_full


def cosines(n: int, like: Tensor) -> Tensor:
    """Return the orthonormal basis n×n, one frequency per row, with the dtype and device of `like`."""
    places = torch.arange(n, dtype=torch.float64, device=like.device)
    basis = torch.cos(math.pi / (2 * n) * torch.outer(places, 2 * places + 1)) * math.sqrt(2 / n)
    basis[0] = math.sqrt(1 / n)
    return basis.to(like.dtype)


def shrinking(n: int) -> float:
    """Return the largest power of two that is at most 1/√n: no coefficient of a basis times it overflows."""
    return 2.0 ** -math.ceil(math.log2(n) / 2)


def transform(tiles: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return left · tile · rightᵀ for tiles [T, a, b]: their DCT, or its inverse if the bases are transposed."""
    return _across(_across(tiles, right), left)


def _across(tiles: Tensor, basis: Tensor) -> Tensor:
    """Return tile · basisᵀ, transposed: T×a×b becomes T×b×a."""
    T, a, b = tiles.shape
    P, Q = in_full(tiles.reshape(T * a, b), basis.t())  # what a narrower product would round away is kept nowhere
    return (P @ Q).view(T, a, b).transpose(1, 2)
