"""Guards: wrappers of an exchange that protect state in unusual steps.

Each guard takes an exchange and is one, so compressors need not know of it; each treats state by its kind.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from commhooks.devices import place_of, runs_later, wait_for_copies
from commhooks.engine.undo import Copies
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Exchange, map_requests
from commhooks.language.requests import AllReduce, Asked, Judge, Part
from commhooks.tensors import computing_dtype

_ELEMENTS_TO_SAMPLE = 1024
_PART_ELEMENTS = 1 << 18


def are_zeros(memory: Tensor) -> bool:
    """Return whether all elements are zero. A few elements usually rule it out; only zeros are read completely."""
    if runs_later(memory):  # the host waits for each look, so look only once
        return not bool(memory.count_nonzero())
    sample = memory[:: max(1, memory.numel() // _ELEMENTS_TO_SAMPLE)]
    return not bool(sample.count_nonzero()) and not any(part.count_nonzero() for part in memory.split(_PART_ELEMENTS))


def take_part_with_zeros(bucket: BucketView, exchange: Exchange) -> Exchange:
    """Run for a rank that has run out of inputs: it sends none of its residual and keeps it unchanged.

    It continues to serve its blocks with their state, and to use the state that it shares with ranks that may still
    have inputs.
    """
    own = [
        kept
        for slot in bucket.slots
        for name, kept in slot.remembered.of_kind("residual", "private").items()
        if slot.remembered.entries[name].holders == 1
    ]
    wait_for_copies(own)
    copies = [kept.clone() for kept in own]
    for kept in own:
        kept.zero_()
    try:
        yield from exchange
    finally:
        wait_for_copies(own)
        for kept, copy in zip(own, copies, strict=True):
            kept.copy_(copy)


def keep_what_is_unused(bucket: BucketView, exchange: Exchange) -> Exchange:
    """Keep the state of parameters whose gradient is zero on every rank, and set their mean to zero.

    If no rank used a parameter, a DDP that searches for unused parameters leaves its gradient unchanged, so the
    residual sent for it would be lost. One extra element for each parameter is sent with the first request, and counts
    the ranks that have a gradient.
    """
    rider = _Rider(bucket)
    try:
        yield from map_requests(rider.carry, exchange)
    finally:
        bucket.scratch.used = {}
    rider.settle()


def weigh(bucket: BucketView, weight: float, exchange: Exchange) -> Exchange:
    """Run an exchange whose mean is weighted: first scale this rank's tensors by its weight over the mean weight.

    The tensors of a rank of weight 0 count as zeros, whatever they are; its residual, which earlier rounds left unsent,
    is sent as ever. The mean of the weights takes an additional round.
    """
    dtype = computing_dtype(bucket.memory.dtype)
    own = torch.full((1,), weight, dtype=dtype, device=bucket.memory.device)
    (mean,) = yield AllReduce(bucket.slots[0].part(own.clone()), average=True)
    if weight:
        bucket.memory.mul_(own / mean)
    else:
        bucket.memory.zero_()
    yield from exchange


class _Rider:
    """The counts of one bucket, and copies of the state that may have to be restored.

    On a GPU the host does not wait to know which gradients are zero here, and no state is copied: writes of state ask
    the bucket's scratch whether they may, and no compressor writes before its first answer, with which the counts
    arrive.
    """

    def __init__(self, bucket: BucketView) -> None:
        self._slots = bucket.slots
        counts = [slot.gradient.count_nonzero() > 0 for slot in bucket.slots]
        self._counts = torch.stack(counts).to(torch.float32)
        self._parts = [slot.part(count) for slot, count in zip(bucket.slots, self._counts.split(1), strict=True)]
        self._has_ridden = False
        self._scratch = bucket.scratch if runs_later(self._counts) else None
        zeros = [number for number, count in enumerate(counts) if not count] if self._scratch is None else []
        self._copies = {number: Copies([self._slots[number]]) for number in zeros}
        self._permit()

    def carry(self, asked: Asked) -> Generator[Asked, Any, Any]:
        """Send the counts with the first request, or as one more request if that is not a sum over all ranks."""
        if self._has_ridden or isinstance(asked, Judge):
            return (yield asked)
        self._has_ridden = True
        requests = asked if isinstance(asked, tuple) else (asked,)
        first = requests[0]
        tensor = first.parts[0].tensor
        if not isinstance(first, AllReduce) or first.group or tensor.is_sparse or tensor.is_complex():
            last = all(request.last for request in requests)
            counts, *answers = yield (AllReduce(*self._parts, average=True, last=last), *requests)
        else:
            wire = next(part.on_wire for part in first.parts)
            riders = [Part(part.tensor, part.layout, wire) for part in self._parts]
            answers = yield (first.with_parts([*first.parts, *riders]), *requests[1:])
            counts, answers[0] = answers[0][len(first.parts) :], answers[0][: len(first.parts)]
        self._counts = torch.cat(counts)
        self._permit()
        return answers if isinstance(asked, tuple) else answers[0]

    def settle(self) -> None:
        """Restore the state of parameters that no rank used, and set their means to zero."""
        unused = self._counts == 0
        for number, copies in self._copies.items():
            copies.restore(unused[number])
        for number in range(len(self._slots)) if self._scratch is not None else self._copies:
            self._slots[number].mean.masked_fill_(unused[number], 0.0)

    def _permit(self) -> None:
        if self._scratch is not None:
            used = (self._counts > 0).unbind()
            self._scratch.used = {
                place_of(kept): own
                for slot, own in zip(self._slots, used, strict=True)
                for kept in slot.remembered.tensors.values()
            }
