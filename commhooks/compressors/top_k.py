"""Top-k: the largest elements of each parameter's gradient, and where they are.

Source: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017; with error feedback,
Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
Idea: few elements carry most of a gradient, so every rank sends its own k largest, and all add up what all have sent.
Bytes on the wire: 8·k for each parameter (a value of 4 and an index of 4), 12·k for float64; contractive. Weakness:
every rank receives what all others send, so the bytes grow with the number of ranks, and choosing takes time.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Compressor, Context, Exchange
from commhooks.language.requests import AllGather, Judge


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """Send the `ratio` largest elements of each parameter: one collective a bucket. Wants `ErrorFeedback` around it."""

    ratio: float = 0.01
    """Lower: smaller messages, more left to the residual. At least one element of each parameter is sent."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise SettingsError(f"TopK(ratio={self.ratio!r}): ratio must be in (0, 1].")

    @property
    def only_sums(self) -> bool:
        """Return False: what is sent cannot be summed."""
        return False

    def loses(self, name: str, parameter: Tensor) -> bool:
        """Return whether not all elements are sent."""
        return self.k(parameter.numel()) < parameter.numel()

    def relative_error(self, elements: int) -> float:
        """Return 1 - k/n: what is sent has at least the average size."""
        return 1 - self.k(elements) / elements if elements else 0.0

    def k(self, elements: int) -> int:
        """Return how many elements are sent of so many."""
        return math.ceil(self.ratio * elements)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Gather every rank's largest elements and their places; the mean is their sum, in rank order."""
        slots = [slot for slot in bucket.slots if slot.gradient.numel()]
        if not slots:
            return
        parts, places = [], []
        for slot in slots:
            M = slot.form()
            places.append(torch.topk(M.abs(), self.k(M.numel()), sorted=False).indices)
            parts += [slot.part(M[places[-1]]), slot.part(places[-1].to(torch.int32))]
        answers = yield AllGather(*parts, last=True)
        received = [(values / context.world_size, at) for values, at in zip(answers[::2], answers[1::2], strict=True)]
        to_judge = answers[::2]
        if slots[0].tile.has_short_range:
            pairs = zip(slots, received, strict=True)
            to_judge += [_sum(slot.room.zero_(), *own).abs().amax().to(slot.gradient.dtype) for slot, own in pairs]
        finite = yield Judge(*to_judge)
        for slot, own, (values, at) in zip(slots, places, received, strict=True):
            slot.keep(slot.form().index_fill_(0, own, 0.0), finite)
            slot.write(_sum(slot.room.zero_(), values, at))


def _sum(memory: Tensor, values: Tensor, indices: Tensor) -> Tensor:
    """Add what all ranks have sent, values and indices W×k, to 1-D memory; in rank order."""
    for of_rank, at in zip(values, indices.long(), strict=True):
        memory.index_add_(0, at, of_rank)
    return memory
