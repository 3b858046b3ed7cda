"""A compressor of your own that keeps state: the largest elements of each rank's momentum.

commhooks.attach(model, ErrorFeedback(inner=MomentumTopK(ratio=0.01)))  # and plain SGD
"""

import dataclasses
import math

from torch import Tensor

from commhooks import Compressor
from commhooks.language import AllGather, BucketView, Context, Entry, Exchange, Judge, Loss, Place, Sends, setting
from commhooks.language.compressor import FEEDBACK_LAWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentumTopK(Compressor):
    """Send the largest elements of momentum·m + gradient + residual; m is this rank's momentum."""

    ratio: float = setting(0.01, above=0, most=1)
    """Lower: smaller messages, but more left in the residual."""
    momentum: float = setting(0.9, least=0, below=1)
    """Higher: a longer memory."""
    sends = Sends.ANYTHING
    exempt = dict.fromkeys((*FEEDBACK_LAWS, "wire", "loss"), "the momentum is sent, not the gradient")

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return 1 - k/n: what is sent has at least the average size."""
        n = parameter.numel()
        return Loss(1 - math.ceil(self.ratio * n) / n) if n else None

    def state(self, place: Place) -> dict[str, Entry]:
        """Return m."""
        return {"momentum": Entry(kind="private")}

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Gather every rank's largest elements; the mean is their sum, in rank order."""
        momenta, chosen, parts = [], [], []
        for slot in bucket.filled:
            faded = self.momentum * slot.state("momentum").to(slot.room)
            momenta.append((faded, faded + slot.gradient))  # `form` may add the residual there
            M = slot.form() + faded
            chosen.append(M.abs().topk(math.ceil(self.ratio * len(M))).indices)
            parts += [slot.part(M[chosen[-1]] / context.world_size), slot.part(chosen[-1])]
        if not parts:
            return
        answers = yield AllGather(*parts, last=True)
        received = list(zip(bucket.filled, answers[::2], answers[1::2], strict=True))
        means = (_sum(slot.room, values, places) for slot, values, places in received)
        finite = yield Judge(*answers[::2], *bucket.filled[0].tile.in_own_range(means))
        for (slot, values, places), (faded, m), own in zip(received, momenta, chosen, strict=True):
            slot.keep((slot.form() + faded).index_fill_(0, own, 0.0), finite)
            slot.commit("momentum", m, finite)
            slot.write(_sum(slot.room, values, places))


def _sum(room: Tensor, values: Tensor, places: Tensor) -> Tensor:
    room.zero_()
    for of_rank, at in zip(values, places, strict=True):
        room.index_add_(0, at, of_rank)
    return room
