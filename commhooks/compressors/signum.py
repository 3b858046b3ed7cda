"""Signum: ranks vote on the sign of each element's momentum, and the majority's sign is the answer.

Source: Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimisation for Non-Convex Problems", ICML
2018, algorithm 2, with the majority vote of Bernstein et al., ICLR 2019.
Idea: each rank averages its own gradients over time and sends the signs of that average; the sign of their sum is
applied.
Bytes on the wire: 1/8 per element, twice, in two hops; elements beyond a parameter's last whole block are sent as
momenta, and the sign of their mean is taken. Biased, with no bound on the error, so it rejects error feedback.
Weakness: the answer is ±1, at random for an element whose gradient is always zero, so the learning rate alone
determines the step size: use SGD without momentum, and about Adam's learning rate. With a momentum of 0.9 steps are ten
times as long, and at the usual learning rates of SGD training diverges. The answer is multiplied by the loss
scale, if `attach(scaler=)` provides one, since the scaler divides by it. A rank that has run out of inputs (`join()`)
votes at random. On a CPU, a step of eager passes takes as long as 20 to 22 copies of the gradient; of compiled ones, 7.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from torch import Tensor

from commhooks.compressors.codecs.vote import Vote
from commhooks.compressors.two_hop import TwoHop
from commhooks.language import BucketView, Compressor, Context, Entry, Exchange, Loss, Place, Sends, Slot, setting
from commhooks.language.compressor import map_requests
from commhooks.language.entries import Declared
from commhooks.language.requests import Asked, Judge


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signum(Compressor):
    """A compressor that returns the majority's sign of each element's momentum, m = beta·m + (1 - beta)·gradient."""

    beta: float = setting(0.9, least=0, below=1)
    """Higher: a longer memory. 0: signSGD with majority vote, without state."""
    block: int = 128
    """Larger: longer ends of parameters are sent whole, and the ranks' shares of the work are less even."""
    seed: int = 0
    """Seeds the coin flips for zeros and ties, together with the step, the parameter's name and the rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Vote(block=self.block)

    sends = Sends.ANYTHING  # votes cannot be summed on the wire

    def loss(self, name: str, parameter: Tensor) -> Loss:
        """Return inf: only signs are sent, and ±1 may be arbitrarily larger than the momentum."""
        return Loss(math.inf)

    @property
    def exempt(self) -> Mapping[str, str]:
        """Name the law of zeros."""
        return {"zeros": "one bit has no third value"}

    def state(self, place: Place) -> Declared:
        """Return the momentum."""
        return {"momentum": Entry(kind="private")} if self.beta else {}

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Replace each gradient by its momentum, vote with `TwoHop`, and take the signs of averaged elements."""
        momenta = _Momenta([self._momentum(slot) for slot in bucket.slots] if self.beta else [], bucket.slots)
        votes = TwoHop(codec=Vote(block=self.block), server_feedback=False, seed=self.seed)
        yield from map_requests(momenta.carry, votes.compress(bucket, context))
        for slot in bucket.slots:
            elements = slot.gradient.numel()
            voted = elements // self.block * self.block if votes.pays(elements, context.world_size) else 0
            averaged = slot.mean[voted:]
            signs = averaged.sign()
            averaged.mul_(0).add_(signs)  # keeps NaN: its sign is 0, which would hide it
            if not isinstance(context.loss_scale, float) or context.loss_scale != 1:
                slot.mean.mul_(context.loss_scale)

    def _momentum(self, slot: Slot) -> Tensor:
        """Write the new momentum over the gradient, and return it in the computing dtype."""
        m = (
            slot.form()
            .mul_(1 - self.beta)
            .add_(slot.state("momentum").to(slot.room, non_blocking=True), alpha=self.beta)
        )
        slot.gradient.copy_(m)
        return m.clone() if slot.scratch.is_needed else m  # memory that all slots share, or the gradient's own


class _Momenta:
    """The momenta, to be kept once the exchange's verdict is known, before votes overwrite them."""

    def __init__(self, momenta: Sequence[Tensor], slots: Sequence[Slot]) -> None:
        self._momenta = momenta
        self._slots = slots

    def carry(self, asked: Asked) -> Generator[Asked, Any, Any]:
        answer = yield asked
        if isinstance(asked, Judge):
            for m, slot in zip(self._momenta, self._slots, strict=False):
                slot.commit("momentum", m, answer)
        return answer
