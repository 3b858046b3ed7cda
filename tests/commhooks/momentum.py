"""A compressor with state of every kind but a share: a momentum of its own, a count that all ranks keep, a residual."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commhooks import ErrorFeedback
from commhooks.language import AllReduce, BucketView, Compressor, Context, Entry, Exchange, Judge, Loss, Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum(Compressor):
    """Send half of what is formed of gradient, momentum and residual; for the laws, and no source."""

    def state(self, place: Place) -> dict[str, Entry]:
        return {
            "momentum": Entry(kind="private"),
            "squares": Entry(kind="private", units=2),
            "steps": Entry(kind="replicated", shape=(1,), init=torch.ones_like),
        }

    def loss(self, name: str, parameter: Tensor) -> Loss:
        return Loss(0.25)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        sent, momenta = [], []
        for slot in bucket.slots:
            M = slot.form()
            momenta.append(slot.state("momentum").to(M) * 0.5 + M)
            sent.append(M / 2)
        parts = [slot.part(own) for slot, own in zip(bucket.slots, sent, strict=True)]
        means = yield AllReduce(*parts, average=True, last=True)
        finite = yield Judge(*means)
        for slot, own, momentum, mean in zip(bucket.slots, sent, momenta, means, strict=True):
            slot.keep(slot.form() - own, finite)
            slot.commit("momentum", momentum, finite)
            slot.commit("squares", slot.state("squares").to(own) + own * own, finite)
            slot.commit("steps", slot.state("steps") + 1, finite)
            slot.write(mean)


def make() -> Compressor:
    return ErrorFeedback(inner=Momentum())
