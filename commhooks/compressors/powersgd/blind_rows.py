"""Replacing the row of a warm-started basis that no longer sees its matrix.

A row q of the basis shows M·q of a matrix M. If q is zero in all nonzero columns of M, M·q is zero, so is the next
basis made from it, and nothing of M is ever sent. Gradients that move to other rows and columns leave such a basis
behind: a bag of words' gradients, for example, or a second task's.

Legend, as in low_rank.py: M n×m; P r×n and Q r×m its factors, transposed; r the rank; k the number of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.language.memory import surely
from commhooks.language.randomness import seeded_normal

EVERY = 16
"""Rows are compared with a random direction in one step of this many. Lower: more work, but sooner recovery."""
LEAST = 0.25
"""A row is replaced if it shows less than this fraction of the part that a random direction shows outside the factor P.
Usually the fraction is about 1; in 6,500 comparisons on small matrices of flat spectrum it was at least 0.29."""
_ROUNDING = 1e-12
"""The fraction of a squared length that counts as outside the other rows, so that dependent rows do no harm."""


class Probe(NamedTuple):
    """The products of a group's matrices with one random direction."""

    direction: Tensor
    """A unit vector of m elements, the same for all k matrices."""
    shown: Tensor
    """k×n: each M times the direction."""

    def at(self, place: int | slice) -> Probe:
        """Return the probe of one matrix, whose `shown` is n, or of several."""
        return Probe(self.direction, self.shown[place])


class Probed(NamedTuple):
    """The factors of a group, k×r×n and k×r×m, and its probe."""

    P: Tensor
    Q: Tensor
    probe: Probe


def is_due(step: int) -> bool:
    """Return whether rows are compared in this step; never in the first one, whose basis is itself random."""
    return step % EVERY == EVERY - 1


def with_probes(factors: Sequence[tuple[Tensor, Tensor]], seed: int) -> list[Probed]:
    """Return each group's P and Q with a probe, which has memory for the products."""
    directions: dict[int, Tensor] = {}
    for _, Q in factors:
        m = Q.shape[2]
        if m not in directions:
            drawn = seeded_normal((m,), seed, Q)
            directions[m] = drawn / torch.linalg.vector_norm(drawn)
    return [Probed(P, Q, Probe(directions[Q.shape[2]], P.new_empty(P.shape[0], P.shape[2]))) for P, Q in factors]


def replace_blind_rows(groups: Sequence[Probed]) -> None:
    """Replace, in this rank's own P = M·Q, at most one row of each matrix by its probe's product.

    It is the row whose product with M is smallest relative to its norm in Q. It is compared only with the part of the
    probe's product outside the span of P, so a row stays if the others leave little of M.

    Any P is correct: it only selects a basis, and messages and residuals follow from the mean P. So each rank may
    decide on its own. A P that is not finite stays unchanged, since comparisons with NaN are false.
    """
    for r in sorted({one.P.shape[1] for one in groups}):  # together, because their matrices are tiny
        _replace([one for one in groups if one.P.shape[1] == r], r)


def _replace(groups: Sequence[Probed], r: int) -> None:
    lengths = [torch.linalg.vector_norm(one.Q, dim=2) for one in groups]  # k×r
    rows = [torch.cat([one.P, one.probe.shown.unsqueeze(1)], dim=1).double() for one in groups]  # no over- or underflow
    shown, outside = _squares(torch.cat([of_group @ of_group.mT for of_group in rows]), r)  # of inner products
    least, row = (shown / torch.cat(lengths).double().square()).min(dim=1)
    is_blind = least < LEAST**2 * outside
    if surely(~is_blind):  # as usual
        return
    is_replaced = is_blind.unsqueeze(1) & (torch.arange(r, dtype=torch.int64, device=row.device) == row.unsqueeze(1))
    for one, length, mask in zip(groups, lengths, is_replaced.split([len(one.P) for one in groups]), strict=True):
        instead = one.probe.shown.unsqueeze(1) * length.unsqueeze(2)  # k×r×n
        torch.where(mask.unsqueeze(2), instead, one.P, out=one.P)


def _squares(products: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Return the squared lengths of P's rows, k×r, and of the probe's product outside their span, k."""
    diagonal = products.diagonal(dim1=1, dim2=2)
    diagonal.mul_(1 + _ROUNDING).add_(torch.finfo(torch.float64).tiny)  # so that a factor exists
    factor = torch.linalg.cholesky_ex(products).L
    return diagonal[:, :r], factor[:, r, r].square()
