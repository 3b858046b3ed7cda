"""Bounds on the difference between two correct results, on any processor.

Kernels differ in the order of a sum's terms, in blocking, and in whether a product is rounded before it is added. The
bounds here hold whatever they do; all are of first order in u, the unit roundoff (Higham, *Accuracy and Stability of
Numerical Algorithms*, 2nd edition: 3.1 and 4.2 for sums and dot products, 19.3 for Householder QR).

Where conditioning multiplies rounding and is not known, a law computes in float64 and asks for `IN_FLOAT64`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

IN_FLOAT64 = 1e-9
"""The bound for float64 results, relative to the largest element.

One rounding is 1.1e-16; sums here have fewer than 1e3 terms, and a first random basis or a few steps multiply what they
lose by less than 1e3: 1e-10. Anything that was rounded to fp32 on its way shows, at 6e-8.
"""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one operation: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def of_mean(world_size: int, dtype: torch.dtype) -> float:
    """Return the error of a mean over ranks that travels in `dtype`, relative to the largest term.

    Each term is divided and cast, then W - 1 additions round: W + 1 roundings of at most the sum of |terms| / W.
    """
    return (world_size + 1) * unit_roundoff(dtype)


def of_conservation(
    to_send: Sequence[Tensor],
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
    wire: torch.dtype | None = None,
    roundings: int = 0,
) -> float:
    """Return how far sent + residual may be from what was to be sent, on average over ranks.

    to_send: what each rank had to send, in the form of one matrix or of a part of it; one tensor for each rank.
    rank: of the factors; 0 for a cast. roundings: how often each element is rounded besides, none larger than c.

    With P orthonormal and Q = Pᵀ·M, no |P|·|Q| is larger than a column of M is long, c at most. Then M = gradient +
    residual is off by u·c; the mean P·Q, a sum of r terms, by r·u·c; the residual M - P·Q, of r + 1 terms, by
    2(r + 1)·u·c; and the mean of Q over the ranks, and so P times it, by `of_mean` times c. What a narrow wire makes of
    a rank's own factor is owed; what it rounds while it sums is not.
    """
    c = max(float(own.double().norm()) for own in to_send)
    rounded = (3 * (rank + 1) + roundings) * unit_roundoff(dtype)
    return c * (rounded + of_mean(len(to_send), wire or dtype))
