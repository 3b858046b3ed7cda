"""PowerSGD: a gradient matrix as the product of two thin ones.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019, algorithms 1
and 2.
Idea: one step of a power iteration, warm-started from the last one, finds a rank-r basis P of the *mean* gradient,
and the mean's coefficients Q in that basis; both are linear in the gradient, so they are summed on the wire. What a
rank's own factors miss stays in its residual and is added to its next gradient.
Bytes on the wire: (n + m)·r for a matrix n×m; vectors and small matrices ride uncompressed in P's collective.
Weakness: two rounds, the second of which cannot start before the first is done.

Legend: M n×m a gradient plus its residual; P r×n the left factor and Q r×m the right one, both kept
transposed, for products over rows of M are the fast ones; r the rank.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commhooks.compressor import BucketView, Compressor, Context, Exchange, Result, Slot, computing_dtype
from commhooks.errors import SettingsError
from commhooks.randomness import seeded_normal, stable_seed
from commhooks.requests import AllReduce

BLOCK_ELEMENTS = 1 << 17
"""Large matrices are worked on in blocks of rows of about so many elements, which stay in a core's cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """Compress matrices to rank `rank`, with local error feedback and warm start: at most two collectives a bucket.

    A step whose answers hold an inf or a NaN commits nothing, and its mean comes out non-finite on every rank.
    """

    rank: int = 1
    """Lower: smaller messages, more left to the residual."""
    min_compression_rate: float = 2.0
    """Higher: fewer matrices are compressed. One is if (n + m)·r·rate < n·m, and its factors are smaller than it."""
    error_feedback: bool = True
    """Off: what was not sent is lost, and the mean is biased."""
    warm_start: bool = True
    """Off: every step starts from a new random Q, and needs more steps to find the same basis."""
    epsilon: float = 0.0
    """Higher: directions of P with a norm near or below it are damped. Zero columns need none."""
    seed: int = 0
    """Seed of the random Q, with the parameter's name and, without warm start, the step."""

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise SettingsError(f"PowerSGD(rank={self.rank!r}): rank must be an integer of at least 1.")
        if not self.min_compression_rate > 0:
            raise SettingsError(
                f"PowerSGD(min_compression_rate={self.min_compression_rate!r}): min_compression_rate must be above 0."
            )
        if not self.epsilon >= 0:
            raise SettingsError(f"PowerSGD(epsilon={self.epsilon!r}): epsilon must be 0 or more.")

    @property
    def uses_slots(self) -> bool:
        """Look at single parameters."""
        return True

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Exchange P and the uncompressed rest, then Q."""
        plan = bucket.plan(self, lambda: _Plan(self, bucket))
        if not plan.matrices:
            mean = yield AllReduce(bucket.memory, average=True, last=True)
            return Result(mean)

        for x in plan.matrices:
            basis = x.basis(self, context)
            for rows in x.blocks:
                torch.mm(basis, x.form(rows).t(), out=x.P[:, rows])  # r×m · m×rows
        plan.pack()
        first = yield AllReduce(plan.first, average=True)
        finite = context.all_finite(first)

        for x in plan.matrices:
            x.P.copy_(orthonormal_rows(x.P, self.epsilon))
            x.project()
        Qs_sent = plan.second_parts(plan.second.clone() if self.error_feedback else plan.second)
        second = yield AllReduce(plan.second, average=True, last=True)
        finite = finite & context.all_finite(second)
        second.add_(torch.where(finite, 0.0, torch.nan))  # one bad element spoils the bucket's mean, for all to see

        for x, Q_sent in zip(plan.matrices, Qs_sent, strict=True):
            for rows in x.blocks:
                P = x.P[:, rows].t()  # rows×r
                if self.error_feedback:
                    left = x.formed(rows).addmm_(P, Q_sent, alpha=-1)  # what this rank did not get through
                    context.commit(x.residual[rows], left, finite)
                x.write_mean(rows, torch.mm(P, x.Q, out=x.room(rows)))
            if self.warm_start:
                x.keep_basis(context, finite)
        plan.unpack()
        return Result(bucket.memory)

    def compresses(self, parameter: Tensor) -> bool:
        """Say whether a parameter's gradient is sent as P and Q."""
        if parameter.dim() < 2 or parameter.numel() == 0 or not parameter.is_floating_point():
            return False
        n, m = parameter.shape[0], parameter.numel() // parameter.shape[0]
        r = min(n, m, self.rank)
        return (n + m) * r * max(self.min_compression_rate, 1.0) < n * m

    def payload_elements(self, parameter: Tensor) -> int:
        """Return how many elements a step sends for this parameter."""
        if not self.compresses(parameter):
            return parameter.numel()
        n, m = parameter.shape[0], parameter.numel() // parameter.shape[0]
        return (n + m) * min(n, m, self.rank)


def orthonormal_rows(P: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return a matrix r×n, r ≤ n, with orthonormal rows that span those of `P`.

    Householder QR: nothing is divided by a norm, so zero rows, dependent rows, and rows of 1e-30 or 1e30 all give
    finite orthonormal rows (arbitrary ones where `P` has none to offer), the same wherever `P` is the same.
    """
    basis, triangle = torch.linalg.qr(P.t())  # n×r, r×r
    if epsilon:
        norms = triangle.diagonal().abs()
        basis = basis * (norms / (norms + epsilon))
    rows: Tensor = basis.t()
    return rows


class _Plan:
    """Lay out one bucket: which slots become matrices, and the memory of the two messages."""

    def __init__(self, settings: PowerSGD, bucket: BucketView) -> None:
        compressed = [slot for slot in bucket.slots if settings.compresses(slot.parameter)]
        rest = [slot.gradient for slot in bucket.slots if not settings.compresses(slot.parameter)]
        dtype = computing_dtype(bucket.memory.dtype)
        self.matrices = [_Matrix(slot, settings, dtype) for slot in compressed]
        P_elements, Q_elements = (sum(sizes) for sizes in self._sizes())
        rest_elements = sum(gradient.numel() for gradient in rest)
        self.first = torch.zeros(P_elements + rest_elements, dtype=dtype, device=bucket.memory.device)
        self.second = torch.zeros(Q_elements, dtype=dtype, device=bucket.memory.device)
        self._rest = rest
        self._rest_packed = list(self.first[P_elements:].split([gradient.numel() for gradient in rest])) if rest else []
        if compressed:
            self._place()
        if bucket.memory.dtype != dtype:
            scratch = bucket.memory.new_empty(max((x.block_rows * x.m for x in self.matrices), default=0), dtype=dtype)
            for x in self.matrices:
                x.scratch = scratch[: x.block_rows * x.m].view(x.block_rows, x.m)

    def _sizes(self) -> tuple[list[int], list[int]]:
        return [x.r * x.n for x in self.matrices], [x.r * x.m for x in self.matrices]

    def _place(self) -> None:
        P_sizes, _ = self._sizes()
        P_parts = self.first[: sum(P_sizes)].split(P_sizes)
        for x, P, Q in zip(self.matrices, P_parts, self.second_parts(self.second), strict=True):
            x.P, x.Q = P.view(x.r, x.n), Q

    def second_parts(self, second: Tensor) -> list[Tensor]:
        """Split the second message into one Q, r×m, for each matrix."""
        parts = second.split(self._sizes()[1])
        return [part.view(x.r, x.m) for x, part in zip(self.matrices, parts, strict=True)]

    def pack(self) -> None:
        """Copy what is not compressed behind the Ps."""
        if self._rest:
            torch._foreach_copy_(self._rest_packed, self._rest)

    def unpack(self) -> None:
        """Copy the mean of what is not compressed back into the bucket."""
        if self._rest:
            torch._foreach_copy_(self._rest, self._rest_packed)


class _Matrix:
    """Hold one compressed parameter's views: its gradient, its factors in the messages, its state."""

    P: Tensor
    Q: Tensor

    def __init__(self, slot: Slot, settings: PowerSGD, dtype: torch.dtype) -> None:
        self.gradient = slot.matrix()
        self.n, self.m = self.gradient.shape
        self.block_rows = min(self.n, max(1, BLOCK_ELEMENTS // self.m))
        self.blocks = [slice(top, min(top + self.block_rows, self.n)) for top in range(0, self.n, self.block_rows)]
        self.r = min(self.n, self.m, settings.rank)
        self.scratch: Tensor | None = None
        self._state = slot.state
        self._dtype = dtype
        if settings.error_feedback and self._kept(slot.state.local, "residual", self.n) is None:
            slot.state.local["residual"] = slot.gradient.new_zeros(self.n, self.m, dtype=dtype)

    @property
    def residual(self) -> Tensor:
        """What this rank has not got through yet, n×m."""
        return self._state.local["residual"]

    def room(self, rows: slice) -> Tensor:
        """Return where a block of M is formed: in the bucket's memory, if that is wide enough."""
        return self.gradient[rows] if self.scratch is None else self.scratch[: rows.stop - rows.start]

    def form(self, rows: slice) -> Tensor:
        """Return a block of M, the gradient plus the residual."""
        M = self.room(rows)
        if self.scratch is not None:
            M.copy_(self.gradient[rows])
        return M.add_(self.residual[rows]) if "residual" in self._state.local else M

    def formed(self, rows: slice) -> Tensor:
        """Return a block of M that was formed in this step; scratch memory has served others since."""
        return self.room(rows) if self.scratch is None else self.form(rows)

    def project(self) -> None:
        """Write this rank's Q, the coefficients of M in the basis P."""
        if self.scratch is None:
            torch.mm(self.P, self.gradient, out=self.Q)  # r×n · n×m
            return
        self.Q.zero_()
        for rows in self.blocks:
            self.Q.addmm_(self.P[:, rows], self.form(rows))

    def basis(self, settings: PowerSGD, context: Context) -> Tensor:
        """Return the Q to start from: the last step's, or a random one, the same on every rank."""
        kept = self._kept(self._state.replicated, "Q", self.r)
        if settings.warm_start and kept is not None:
            return kept
        when = () if settings.warm_start else (context.step,)
        seed = stable_seed("powersgd", settings.seed, self._state.key, self.r, self.m, *when)
        basis = seeded_normal((self.r, self.m), seed, like=self.P)
        if settings.warm_start:
            self._state.replicated["Q"] = basis
        return basis

    def keep_basis(self, context: Context, allowed: Tensor) -> None:
        """Keep Q for the next step, its rows scaled to 1; a row of zeros would never recover, so the old one stays."""
        largest = self.Q.abs().amax(dim=1, keepdim=True)  # (r, 1)
        context.commit(self._state.replicated["Q"], self.Q / largest, allowed & (largest > 0))

    def write_mean(self, rows: slice, mean: Tensor) -> None:
        """Write a block of the mean where the gradient was, unless it is there already."""
        if self.scratch is not None:
            self.gradient[rows].copy_(mean)

    def _kept(self, memory: dict[str, Tensor], name: str, rows: int) -> Tensor | None:
        kept = memory.get(name)
        fits = kept is not None and kept.shape == (rows, self.m) and kept.dtype == self._dtype
        return kept if fits else None
