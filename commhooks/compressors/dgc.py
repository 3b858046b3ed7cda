"""Deep gradient compression: top-k of a momentum that every rank keeps for itself.

Source: Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", ICLR 2018, section 3.
Idea: each rank accumulates its own momentum, instead of its gradients, and sends the k largest elements of the sum; for
the elements sent, momentum and sum restart from zero (momentum factor masking). Gradients are clipped on each rank, and
the first steps send more.
Bytes on the wire: the same as top-k's. Biased: for any size, at most 1 - k/n of |sum|² is left for later steps.
Weakness: two values per element are kept, and training diverges if the optimiser has a momentum of its own, since the
mean already includes it: give the optimiser none, or set momentum=0 here; and on short runs raise the ratio to 0.01. It
takes as long as top-k.

Legend: g gradient; m momentum; u velocity; v the unsent sum; N ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from commhooks.compressors.sparse.gathering import Sent, SparsePlan, gather
from commhooks.compressors.sparse.indices import Indices, largest_error
from commhooks.language import FEEDBACK_LAWS, BucketView, Compressor, Context, Exchange, Loss, Sends, Slot, setting
from commhooks.language.entries import RESIDUAL, Declared, Entry
from commhooks.language.memory import add_residuals
from commhooks.language.place import Place

_FIRST_RATIO = 0.25
_STAGES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DGC(Compressor):
    """A compressor that sends the largest elements of each rank's accumulated momentum.

    Use it with SGD without momentum.
    """

    ratio: float = setting(0.001, above=0, most=1)
    """Lower: smaller messages, but older updates. At least one element of each parameter is sent."""
    momentum: float = setting(0.9, least=0, below=1)
    """The momentum m, which replaces the optimizer's. Higher: a longer memory; 0: top-k with error feedback, without a
    velocity."""
    clip: float | None = setting(None, above=0)
    """The norm above which a parameter's gradient is clipped, without the loss scale; each rank clips its own gradient
    at this over the square root of the number of ranks. The paper clips all parameters as one vector."""
    warm_up: int = setting(0, least=0)
    """The number of first steps with a higher ratio: a quarter at first, then lowered after each quarter of them."""
    indices: Indices = "auto"
    """The coding of indices, and the elements that the largest are chosen from; see `TopK`."""

    sends = Sends.ANYTHING  # what is sent cannot be summed

    def loss(self, name: str, parameter: Tensor) -> Loss:
        """Return 1 - k/n for the final ratio; DGC itself keeps the unsent part."""
        return Loss(largest_error(self.indices, parameter.numel(), self.ratio), is_kept=False)

    @property
    def exempt(self) -> Mapping[str, str]:
        """Name the laws of error feedback."""
        return dict.fromkeys((*FEEDBACK_LAWS, "wire"), "a momentum is sent, not the gradient")

    def state(self, place: Place) -> Declared:
        """Return v, and u if there is a momentum."""
        velocity = {"velocity": Entry(kind="private")} if self.momentum else {}
        return {RESIDUAL: Entry(kind="residual"), **velocity}

    def ratio_of(self, step: int) -> float:
        """Return the fraction of the elements that a step sends; it falls exponentially from a quarter to `ratio`."""
        if step >= self.warm_up or self.ratio > _FIRST_RATIO:
            return self.ratio
        stage = _STAGES * step // self.warm_up
        return float(_FIRST_RATIO * (self.ratio / _FIRST_RATIO) ** (stage / _STAGES))

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Gather the largest elements of every rank's v; the mean is their sum, in rank order."""
        if not bucket.filled:
            return
        ratio = self.ratio_of(context.step)
        plan = bucket.plan((self, ratio), lambda: SparsePlan.of(bucket, self.indices, ratio, by_slot=True))
        sent = []
        for piece in plan.pieces:
            slot = piece.slot
            v = self._velocity(slot, context)
            add_residuals([v], [slot.state(RESIDUAL)])
            sent.append(Sent.largest_of(piece, v))
        finite, received = yield from gather(plan, sent, context)
        for own, of_all in zip(sent, received, strict=True):
            slot = own.piece.slot
            u = self._velocity(slot, context)  # recomputed, to avoid keeping those of all slots
            v = slot.form().copy_(u)
            add_residuals([v], [slot.state(RESIDUAL)])
            slot.commit(RESIDUAL, v.index_fill_(0, own.places, 0.0), finite)
            if self.momentum:
                slot.commit("velocity", u.index_fill_(0, own.places, 0.0), finite)
            slot.write(of_all.overwrite(slot.room))

    def _velocity(self, slot: Slot, context: Context) -> Tensor:
        """Return u updated with this step's gradient, in new memory."""
        g = slot.form()
        if self.clip is None:
            u = g.clone()
        else:
            largest = g.norm(math.inf).clamp(min=torch.finfo(g.dtype).tiny)
            u = g / largest  # squares of g itself could overflow
            limit = self.clip / context.world_size**0.5 * context.loss_scale  # exact if the scale is a power of two
            u = torch.mul(g, (largest.reciprocal() * limit / u.norm()).clamp(max=1), out=u)
        if self.momentum:
            add_residuals([u], [slot.state("velocity")], self.momentum)
        return u
