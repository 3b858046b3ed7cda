"""What goes around an exchange so that state survives where a DDP's step is not like the others.

Each guard takes an exchange and is one, so a compressor knows nothing of it.
"""

from __future__ import annotations

import functools
from collections.abc import Generator

import torch
from torch import Tensor

from commhooks.engine.undo import Copies
from commhooks.language.compressor import BucketView, Exchange, carried_by
from commhooks.language.requests import AllReduce, Layout, Request
from commhooks.streams import wait_for_copies

_LAYOUTS_TO_KEEP = 4096
_ELEMENTS_TO_SAMPLE = 1024
_PART_ELEMENTS = 1 << 18


def refuse_what_is_not_declared(bucket: BucketView, exchange: Exchange) -> Exchange:
    """Run an exchange; raise `CompressorError` if it leaves local state behind of which nobody knows how it behaves.

    Here, in the exchange, so that the other ranks hear of it.
    """
    result = yield from exchange
    for slot in bucket.slots:
        for name in slot.state.local:
            slot.state.entry(name)
    return result


def has_joined(memory: Tensor) -> bool:
    """Return whether a DDP handed in zeros for a rank that has run out of inputs: outside of any backward pass."""
    return torch._C._current_graph_task_id() == -1 and _is_zero(memory)


def _is_zero(memory: Tensor) -> bool:
    """Return whether all elements are zero. A gradient is known by a few of its own; only zeros are looked at whole."""
    if memory.is_cuda:  # the host waits for each look, so there is one
        return not bool(memory.count_nonzero())
    sample = memory[:: max(1, memory.numel() // _ELEMENTS_TO_SAMPLE)]
    return not bool(sample.count_nonzero()) and not any(part.count_nonzero() for part in memory.split(_PART_ELEMENTS))


def take_part_with_zeros(bucket: BucketView, exchange: Exchange) -> Exchange:
    """Run for a rank that has run out of inputs: it sends none of its residual and keeps it unchanged."""
    wait_for_copies(own for slot in bucket.slots for own in slot.state.local.values())
    put_by = [
        {name: own.clone() for name, own in slot.state.local.items() if slot.state.entry(name).kind == "residual"}
        for slot in bucket.slots
    ]
    for slot, kept in zip(bucket.slots, put_by, strict=True):
        for name in kept:
            slot.state.local[name].zero_()
    try:
        return (yield from exchange)
    finally:
        wait_for_copies(own for slot in bucket.slots for own in slot.state.local.values())
        for slot, kept in zip(bucket.slots, put_by, strict=True):
            for name, own in kept.items():
                slot.state.local[name].copy_(own)  # by name: the exchange may have laid residuals together anew


def keep_what_is_unused(bucket: BucketView, exchange: Exchange) -> Exchange:
    """Let parameters whose gradient is zero on every rank keep their state, and send nothing of what they owe.

    A DDP that searches for unused parameters leaves the gradient of one that no rank used as it was, so what its
    residual had sent would be lost. One element for each parameter rides in the first request, and counts the ranks
    that have a gradient.
    """
    rider = _Rider(bucket)
    result = yield from carried_by(rider.carry, exchange)
    rider.settle()
    return result


class _Rider:
    """Hold the counts of one bucket, and copies of the state that may have to come back."""

    def __init__(self, bucket: BucketView) -> None:
        self._slots = bucket.slots
        self._layout = _one_of_each(bucket.layout)
        self._counts = torch.stack([slot.gradient.count_nonzero() > 0 for slot in bucket.slots]).to(torch.float32)
        self._copies: dict[int, Copies] | None = None

    def carry(self, request: Request) -> Generator[Request, Tensor, Tensor]:
        """Let the counts ride with the first request if it is a sum, or go before it."""
        if self._copies is not None:
            return (yield request)
        self._copies = {number: Copies([self._slots[number]]) for number in self._candidates()}
        if not isinstance(request, AllReduce) or request.tensor.is_sparse or request.tensor.is_complex():
            self._counts = yield AllReduce(self._counts, average=True, layout=self._layout)
            return (yield request)
        own = request.tensor
        answer = yield AllReduce(
            torch.cat([own.reshape(-1), self._counts.to(own.dtype)]),
            average=request.average,
            wire=request.wire,
            last=request.last,
            layout=None if request.layout is None else _one_behind_the_other(request.layout, self._layout),
        )
        own.copy_(answer[: own.numel()].view(own.shape))
        self._counts = answer[own.numel() :]
        return own

    def settle(self) -> None:
        """Give back the state of what no rank used, and a mean of zero."""
        for number, copies in (self._copies or {}).items():
            unused = self._counts[number] == 0
            copies.restore(unused)
            gradient = self._slots[number].gradient
            gradient.copy_(torch.where(unused, torch.zeros_like(gradient), gradient))

    def _candidates(self) -> list[int]:
        """Return the places of what may be unused everywhere: what is so here; on a GPU, where nobody waits, all."""
        if self._counts.is_cuda:
            return list(range(len(self._slots)))
        return [number for number, count in enumerate(self._counts.tolist()) if not count]


# Layouts are told apart by identity, and packed messages are kept by layout: a step's must be those of the step before.


@functools.lru_cache(maxsize=_LAYOUTS_TO_KEEP)
def _one_of_each(layout: Layout) -> Layout:
    return Layout(layout.keys, (1,) * len(layout.keys))


@functools.lru_cache(maxsize=_LAYOUTS_TO_KEEP)
def _one_behind_the_other(first: Layout, second: Layout) -> Layout:
    return Layout(first.keys + second.keys, first.sizes + second.sizes)
