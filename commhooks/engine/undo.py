"""Copies of state, to be restored if a step turns out not to count."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from commhooks.devices import Mark, keep_until_read, mark_of, queue_copy, runs_later, wait_for_copies
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Exchange
from commhooks.tensors import all_finite


class Copies:
    """Copies of some slots' state, to be restored later."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._live = [tensor for slot in slots for tensor in slot.remembered.tensors.values()]
        self.kept: list[Tensor] = [torch.empty_like(tensor, pin_memory=tensor.is_pinned()) for tensor in self._live]
        self.refresh()

    def refresh(self) -> None:
        """Copy the current state instead."""
        if self._live:
            wait_for_copies(self._live)
            torch._foreach_copy_(self.kept, self._live)

    def restore(self, wanted: Tensor | None = None) -> None:
        """Restore the copies: always, or if a 0-dim bool is true; on a GPU the host does not wait to know."""
        if wanted is None or not runs_later(wanted):
            wait_for_copies(self._live)
            if self._live and (wanted is None or wanted):
                torch._foreach_copy_(self._live, self.kept)
            return
        keep_until_read(self.kept)  # this may be another stream than that of the bucket, on which they were made
        for live, kept in zip(self._live, self.kept, strict=True):
            before, now = (state.to(wanted.device, non_blocking=True) for state in (kept, live))
            queue_copy(live, torch.where(wanted, before, now))


class UndoLog:
    """A log that undoes a step's changes of state if the mean of any of its buckets is not finite.

    It judges the means themselves, which are identical on every rank, and which a gradient scaler also inspects. This
    takes a second copy of the state, and one pass over every mean.
    """

    def __init__(self) -> None:
        self._copies: weakref.WeakKeyDictionary[BucketView, Copies] = weakref.WeakKeyDictionary()
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the previous step."""
        self._of_step: list[Copies] = []
        self._finite: list[Tensor] = []
        self._settled: list[Mark] = []
        self._buckets = 0
        self._complete = False

    def expect(self, *, last: bool) -> None:
        """Count a bucket that will be judged; call it in the order of submission, before its exchange begins."""
        self._buckets += 1
        self._complete = last

    def forget(self, bucket: BucketView | None = None) -> None:
        """Forget which memory to copy, for one bucket or all, since state was laid out again."""
        if bucket is None:
            self._copies.clear()
        else:
            self._copies.pop(bucket, None)

    def watch(self, bucket: BucketView, exchange: Exchange) -> Exchange:
        """Run an exchange; copy the bucket's state before anything is written to it."""
        copies = self._copies.get(bucket)
        if copies is None:
            copies = self._copies[bucket] = Copies(bucket.slots)
        else:
            copies.refresh()
        self._of_step.append(copies)
        yield from exchange

    def tensors(self) -> list[Tensor]:
        """Return the copies that are kept."""
        return [kept for copies in self._copies.values() for kept in copies.kept]

    def settle(self, mean: Tensor) -> None:
        """Include a bucket's mean; after the step's last one, undo the step if one was not finite."""
        self._finite.append(all_finite([mean]))
        if (mark := mark_of(mean.device)) is not None:
            self._settled.append(mark)
        if self._complete and len(self._finite) == self._buckets:
            for mark in self._settled:  # buckets may be on several streams
                mark.wait()
            keep_until_read(self._finite)
            spoilt = ~torch.stack(self._finite).all()
            for copies in self._of_step:
                copies.restore(spoilt)
