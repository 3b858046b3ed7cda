"""How far apart two correct results may be, on any processor: the laws' bounds, and some that only tests need."""

from __future__ import annotations

import torch
from torch import Tensor

from commhooks.testing.bounds import IN_FLOAT64, of_conservation, of_mean, unit_roundoff

__all__ = [
    "IN_FLOAT64", "assert_equal_in_float64", "of_conservation", "of_mean", "of_orthonormal_rows", "unit_roundoff",
]  # fmt: skip


def assert_equal_in_float64(got: object, wanted: object) -> None:
    """Assert that float64 results are equal up to rounding."""
    assert isinstance(got, Tensor) and isinstance(wanted, Tensor) and got.dtype == wanted.dtype == torch.float64
    torch.testing.assert_close(got, wanted, rtol=0, atol=IN_FLOAT64 * float(wanted.abs().max()))


def of_orthonormal_rows(rank: int, width: int, dtype: torch.dtype) -> float:
    """Return how far, in norm, the basis r×n that Householder QR makes is from that of a matrix close to the input.

    The input itself is off by as much, relative to its norm (Higham, theorem 19.4; the constant is ours). A reflection
    b - v·(vᵀ·b) of n elements, |v|² = 2: the dot product is off by n·u·|v|·|b|, so the product by 2n·u·|b|; v, a norm
    and a scaling, is off by (n + 4)·u·|v| and comes in twice, so 4(n + 4)·u·|b| more; and two roundings of each
    element make it 6(n + 3)·u. There are r of them, applied to r columns.
    """
    return float(rank**1.5) * 6 * (width + 3) * unit_roundoff(dtype)
