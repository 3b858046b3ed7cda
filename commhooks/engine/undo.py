"""Copies of state as it was, for a step that turns out not to count."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from commhooks.language.compressor import BucketView, Exchange, Slot, carried_by
from commhooks.language.requests import Request
from commhooks.streams import queue_copy, wait_for_copies

Place = tuple[int, str, str]
"""Which parameter of a bucket, whether what it remembers is replicated or local, and by which name."""


class Copies:
    """Hold copies of what a bucket's parameters remember, to write back.

    By name: an exchange may put another tensor in the place of one, with the same in it.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._live: dict[Place, Tensor] = {}
        self._kept: dict[Place, Tensor] = {}
        self.complete()

    @property
    def kept(self) -> list[Tensor]:
        """The copies."""
        return list(self._kept.values())

    def complete(self) -> None:
        """Copy what there is no copy of yet; write the others back to where it lies now."""
        self._live = self._found()
        wait_for_copies(self._live.values())
        for place, tensor in self._live.items():
            if place not in self._kept or self._kept[place].shape != tensor.shape:
                self._kept[place] = tensor.clone()

    def refresh(self) -> None:
        """Copy what is there now instead, into the memory of the last copies if that lies where it did."""
        now = self._found()
        if {place: id(tensor) for place, tensor in now.items()} != {p: id(tensor) for p, tensor in self._live.items()}:
            self._kept = {}
            self.complete()
        elif now:
            wait_for_copies(now.values())
            torch._foreach_copy_([self._kept[place] for place in now], list(now.values()))

    def restore(self, wanted: Tensor | None = None) -> None:
        """Write the copies back: always, or where a 0-dim bool says so; on a GPU nobody waits to know."""
        if wanted is None or not wanted.is_cuda:
            wait_for_copies(self._live.values())
            if self._live and (wanted is None or wanted):
                torch._foreach_copy_(list(self._live.values()), [self._kept[place] for place in self._live])
            return
        for place, live in self._live.items():
            kept = self._kept[place]
            chosen = torch.where(wanted, kept.to(wanted.device), live.to(wanted.device))
            queue_copy(live, chosen)

    def _found(self) -> dict[Place, Tensor]:
        return {
            (number, kind, name): tensor
            for number, slot in enumerate(self._slots)
            for kind, held in (("replicated", slot.state.replicated), ("local", slot.state.local))
            for name, tensor in held.items()
        }


class Journal:
    """Undo what a step's buckets committed if the mean of any of them is not finite.

    Judged on the means themselves, which are alike on every rank, and which a gradient scaler looks at too. Costs a
    second copy of the state, and a look at every mean.
    """

    def __init__(self) -> None:
        self._copies: weakref.WeakKeyDictionary[BucketView, Copies] = weakref.WeakKeyDictionary()
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step before."""
        self._of_step: list[Copies] = []
        self._finite: list[Tensor] = []
        self._buckets = 0
        self._complete = False

    def expect(self, *, last: bool) -> None:
        """Count a bucket that will be judged; called in the order of hand-in, before its exchange begins."""
        self._buckets += 1
        self._complete = last

    def watch(self, bucket: BucketView, exchange: Exchange) -> Exchange:
        """Run an exchange; copy the bucket's state before anything is written to it."""
        copies = self._copies.get(bucket)
        if copies is None:
            copies = self._copies[bucket] = Copies(bucket.slots)
        else:
            copies.refresh()
        self._of_step.append(copies)
        return (yield from carried_by(functools.partial(_complete, copies), exchange))

    def tensors(self) -> list[Tensor]:
        """Return the copies that are kept."""
        return [kept for copies in self._copies.values() for kept in copies.kept]

    def judge(self, mean: Tensor) -> None:
        """Take a bucket's mean into account, and after the step's last one undo the step if one was not finite."""
        self._finite.append(torch.isfinite(mean._values() if mean.is_sparse else mean).all())
        if self._complete and len(self._finite) == self._buckets:
            spoilt = ~torch.stack(self._finite).all()
            for copies in self._of_step:
                copies.restore(spoilt)


def _complete(copies: Copies, request: Request) -> Generator[Request, Tensor, Tensor]:
    """Copy state that the exchange created before its first request: all of it exists now, and is unchanged so far."""
    copies.complete()
    return (yield request)
