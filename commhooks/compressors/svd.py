"""SVD: the best approximation of rank r of every rank's own gradient.

Source: Wang et al., "ATOMO: Communication-efficient Learning via Atomic Sparsification", NeurIPS 2018, section 4, with
the largest singular values in place of sampled ones.
Idea: no matrix of rank r is closer to a matrix than its r largest singular values with their vectors (Eckart and
Young). Every rank sends its own, and all ranks add them up: the ideal that `PowerSGD` approximates.
Bytes on the wire: 4·(n + m)·r for a matrix n×m, 8·(n + m)·r for float64; vectors and small matrices are sent whole.
Biased: ω ≤ 1 - r/min(n, m). Weakness: it decomposes every matrix in every step, which on a GPU also makes the host
wait; and every rank receives all others' messages, so the bytes grow with the number of ranks. It is a reference for
comparison, and the slowest: more than 100 copies of the gradient on a CPU.
Range: no mean overflows if |M| ≤ L/2 on every rank, in the Frobenius norm, with L the largest number of the computing
dtype; if a singular value exceeds L, all ranks see an inf.

Legend: M n×m a gradient plus its residual, or k×n×m of fused experts; U·S n×r and Vᵀ r×m its factors; W ranks.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commhooks.compressors.powersgd.matrices import MatrixForm, OfMatrices, error_of_rank
from commhooks.compressors.powersgd.precision import in_full
from commhooks.devices import runs_later
from commhooks.language import BucketView, Context, Exchange, Loss, Sends, Slot, setting
from commhooks.language.requests import AllGather, AllReduce, Judge, Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class SVD(OfMatrices):
    """A compressor that sends the best rank-`rank` approximation of each matrix: one round per bucket.

    It has error feedback, unless it is inside `WithoutFeedback`.
    """

    rank: int = setting(1, least=1)
    """Lower: smaller messages, but more left in the residual."""
    min_compression_rate: float = setting(2.0, above=0)
    """Higher: fewer matrices are compressed: only those whose factors are this many times smaller (at least 1)."""

    sends = Sends.ANYTHING  # factors of different matrices cannot be summed
    needs_equal_kernels = True  # each rank multiplies all ranks' factors

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return the error of rank r for a square matrix whose singular values are all equal."""
        form = self.paying_form(parameter, name)
        return None if form is None else Loss(error_of_rank(self.rank, form.n * form.m))

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Gather every rank's factors; the mean is the sum of their products, in rank order."""
        forms = [(slot, self.paying_form(slot.parameter, slot.name)) for slot in bucket.slots]
        matrices = [(slot, form) for slot, form in forms if form]
        rest = [slot.tile for slot, form in forms if form is None]
        own = [_factors(form.view(slot.form()), self.rank) for slot, form in matrices]
        parts = [slot.part(factor) for (slot, _), factors in zip(matrices, own, strict=True) for factor in factors]
        requests: list[Request] = [AllGather(*parts, last=True)] if parts else []
        if rest:
            requests.append(AllReduce(*(tile.part() for tile in rest), average=True, last=True))
        answers = yield tuple(requests)
        gathered = answers[0] if parts else []
        received = [*zip((US / context.world_size for US in gathered[::2]), gathered[1::2], strict=True)]
        means_of_rest = answers[-1] if rest else []

        means = (_sum(*x, *sent) for x, sent in zip(matrices, received, strict=True))
        in_own_range = bucket.slots[0].tile.in_own_range(means) if bucket.slots else ()
        finite = yield Judge(*gathered, *means_of_rest, *in_own_range)
        for (slot, form), (US, Vt), sent in zip(matrices, own, received, strict=True):
            if slot.tile.keeps:
                unsent = slot.form()
                _add_product(form.view(unsent), US, Vt, alpha=-1)
                slot.keep(unsent, finite)
            slot.write(_sum(slot, form, *sent))
        for tile, mean in zip(rest, means_of_rest, strict=True):
            tile.write(mean)

    def sent(self, form: MatrixForm) -> int:
        """Return the number of elements of both factors."""
        return (form.n + form.m) * min(form.n, form.m, self.rank)


def _factors(M: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Return U·S n×r and Vᵀ r×m, or k of each; U·S is all NaN if M is not finite, and so has no decomposition."""
    finite = M.isfinite().all()
    U, S, Vt = torch.linalg.svd(torch.where(finite, M, 0.0), full_matrices=False)
    return U[..., :r] * S[..., :r].unsqueeze(-2) + torch.where(finite, 0.0, torch.nan), Vt[..., :r, :]


def _sum(slot: Slot, form: MatrixForm, US: Tensor, Vt: Tensor) -> Tensor:
    """Add up the products of all ranks' factors, W×n×r and W×r×m, or of stacks, in the slot's room, in rank order."""
    room = slot.room.zero_()
    for of_rank in zip(US, Vt, strict=True):
        _add_product(form.view(room), *of_rank)
    return room


def _add_product(memory: Tensor, US: Tensor, Vt: Tensor, alpha: float = 1) -> None:
    if not runs_later(memory):  # with the same bits on every processor, which a product of matrices has not
        for column, row in zip(US.split(1, dim=-1), Vt.split(1, dim=-2), strict=True):
            memory.add_(column * row, alpha=alpha)
        return
    add = memory.addmm_ if memory.dim() == 2 else memory.baddbmm_
    add(*in_full(US, Vt), alpha=alpha)
