"""Orthonormal bases that are the same, bit for bit, on every rank with a CPU.

Each rank computes the basis of the mean factor itself, so nothing in it may depend on the processor. LAPACK's results
do. Householder's reflections are computed here in double, each operation rounded by itself and in its place in a fixed
order; the compiled form (native/orthonormal.h) does the same. A root may differ in the last bit from one library to
another, so it is rounded to float, which the last bit of a double does not change.

On a GPU a factorization is one kernel of its library: ranks need equal GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.devices import runs_later
from commhooks.native import low_rank as native


def set_orthonormal(to: Sequence[Tensor], P: Sequence[Tensor], epsilon: float, level: str | None) -> None:
    """Write the orthonormal rows of several batches [k, r, n], by compiled passes if a level is given."""
    if level is not None:
        native.orthonormalize(level, P, to, epsilon)
    else:
        torch._foreach_copy_(list(to), [orthonormal_rows(batch, epsilon) for batch in P])


def orthonormal_rows(P: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return a matrix r×n, r ≤ n, with orthonormal rows that span the rows of `P`; for a batch of matrices, a batch.

    Householder QR with LAPACK's signs. Nothing is divided by a norm, so zero rows, dependent rows, and rows of 1e-30 or
    1e30 all give finite orthonormal rows (arbitrary ones if `P` provides none), identical for identical `P`. With
    `epsilon`, a row is multiplied by d / (d + epsilon), where d is the norm of its part outside the rows before it.
    """
    if runs_later(P):
        basis, triangle = torch.linalg.qr(P.mT)  # n×r, r×r
        return _damped(basis.mT, triangle.diagonal(dim1=-2, dim2=-1), epsilon)
    r = P.shape[-2]
    A = P.to(torch.float64, copy=True)
    largest = A.abs().amax(dim=-1)
    A.div_(torch.where(largest > 0, largest, 1.0).unsqueeze(-1))  # so that no square over- or underflows
    norms, reflectors = [], []
    for j in range(r):
        v = A[..., j, j:]
        squares, lead = _sum(v * v), v[..., 0].clone()
        norm = _root(squares, P.dtype)
        v[..., 0] += torch.where(lead < 0, -norm, norm)
        of_v = (squares - lead * lead) + v[..., 0] * v[..., 0]
        tau = torch.where(norm == 0, 0.0, 2 / of_v)
        _reflect(A[..., j + 1 :, j:], v, tau)
        norms.append(norm)
        reflectors.append((v, tau))
    rows = torch.zeros_like(A)
    rows.diagonal(dim1=-2, dim2=-1).fill_(1)
    for j in reversed(range(r)):
        _reflect(rows[..., j:, j:], *reflectors[j])
    return _damped(rows, torch.stack(norms, dim=-1) * largest, epsilon).to(P.dtype)


def _damped(rows: Tensor, diagonal: Tensor, epsilon: float) -> Tensor:
    if not epsilon:
        return rows
    norms = diagonal.abs()
    return rows * (norms / (norms + epsilon)).unsqueeze(-1)


def _reflect(rows: Tensor, v: Tensor, tau: Tensor) -> None:
    """Reflect rows [..., i, n] in place, each minus v times its product with v times tau."""
    v = v.unsqueeze(-2)
    d = _sum(rows * v) * tau.unsqueeze(-1)
    rows.sub_(d.unsqueeze(-1) * v)


def _sum(x: Tensor) -> Tensor:
    """Return the sums over the last dimension, added up in halves: a fixed order. This overwrites `x`."""
    n = x.shape[-1]
    half = 1 << (n - 1).bit_length() >> 1  # the greatest power of two below n; 0 for 1
    if half:
        x[..., : n - half] += x[..., half:]
        x = x[..., :half]
    while half > 1:
        first, second = x.chunk(2, dim=-1)
        x, half = first + second, half // 2
    return x[..., 0]


def _root(squares: Tensor, dtype: torch.dtype) -> Tensor:
    """Return roots of doubles as exact as `dtype` needs, the same whatever library computes roots."""
    root = squares.float().double().sqrt().float().double()
    if dtype == torch.float64:
        for _ in range(2):  # Heron's steps: each doubles the number of right digits
            root = torch.where(root == 0, 0.0, (root + squares / root) / 2)
    return root
