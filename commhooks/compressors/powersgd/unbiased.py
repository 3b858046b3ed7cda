"""Unbiased PowerSGD: a gradient matrix times a random thin one, and back.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", NeurIPS 2019, section 4.1 and
the appendix on the unbiased form.
Idea: if E[U·Uᵀ] is the identity, M·U·Uᵀ equals M on average. All ranks draw the same U, so M·U can be summed on the
wire and U is not sent.
Bytes on the wire: 4·n·r for a matrix n×m, 8·n·r for float64, about half of PowerSGD's; vectors and matrices with few
columns are sent whole. Unbiased: ω is at most (m + 1)/r, as it is for a Gaussian U; it is (m + κ - 2)/r for elements of
kurtosis κ, here 2.85 (`seeded_normal`). Weakness: ω is above 2 for every compressed matrix,
so it must not be wrapped in `ErrorFeedback`, and steps must be small: at rank 1 training diverges under SGD with
momentum 0.9. A rank of at least (m + 1)/9 works, or no momentum; or PowerSGD, whose error is far smaller at any rank.

Legend: M n×m a gradient; U m×r, kept transposed in place of PowerSGD's Q; P = M·U, kept as r×n.
"""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from commhooks.compressors.powersgd.low_rank import LowRankPlan, planned
from commhooks.compressors.powersgd.matrices import MatrixForm, OfMatrices
from commhooks.language import AllReduce, BucketView, Context, Exchange, Loss, setting
from commhooks.language.randomness import seeded_normal, stable_seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnbiasedPowerSGD(OfMatrices):
    """A compressor that averages each matrix times `rank` random vectors: one collective per bucket, without state.

    The mean is right on average.
    """

    rank: int = setting(1, least=1)
    """Lower: smaller messages, but a larger variance."""
    min_compression_rate: float = setting(2.0, above=0)
    """Higher: fewer matrices are compressed: only those for which this many times fewer elements are sent (at least
    1)."""
    seed: int = 0
    """Seeds the random vectors, together with the parameter's name and the step."""

    needs_equal_kernels = True  # each rank multiplies with U

    def may_join_buckets(self, step: int) -> bool:
        """Return True, as PowerSGD."""
        return True

    def loss(self, name: str, parameter: Tensor) -> Loss:
        """Return (m + 1)/r for the worst matrix with as many elements: one row, and so r = 1."""
        return Loss(parameter.numel() + 1.0, unbiased=True, is_kept=False)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Average M·U, and multiply the answer by Uᵀ."""
        plan = planned(bucket, self, lambda level: LowRankPlan.of_slots(bucket, self.paying_form, self._r, level))
        for group in plan.groups:
            for x, of_stack in zip(group.matrices, group.places["Q"], strict=True):
                Q = of_stack[0] if len(of_stack) == 1 else of_stack
                # Uᵀ r×m, with elements of variance 1/r; the same on every rank, and another for each matrix.
                seed = stable_seed("unbiased powersgd", self.seed, x.key, context.step)
                Q.copy_(seeded_normal(tuple(Q.shape), seed, Q) / math.sqrt(x.r))
        plan.multiply("P", turn=0)
        answers = yield AllReduce(
            *(group.parts["P"] for group in plan.groups), *plan.rest.parts(), average=True, last=True
        )
        plan.write("P", answers[: len(plan.groups)])
        plan.rest.write(answers[len(plan.groups) :])

    def _r(self, form: MatrixForm) -> int:
        return min(form.n, form.m, self.rank)

    def sent(self, form: MatrixForm) -> int:
        """Return the number of elements of P."""
        return form.n * self._r(form)
