"""Copies of state as it was, for a step that turns out not to count."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from commhooks.compressor import BucketView, Exchange, carried_by
from commhooks.requests import Request


class Copies:
    """Hold copies of tensors, to write back."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._live: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Copy those of which there is no copy yet."""
        there = set(map(id, self._live))
        new = [tensor for tensor in tensors if id(tensor) not in there]
        self._live += new
        self.kept += [tensor.clone() for tensor in new]

    def refresh(self, tensors: Iterable[Tensor]) -> None:
        """Copy these instead, into the memory that is there if they are the same ones."""
        now = list(tensors)
        if [id(tensor) for tensor in now] != [id(tensor) for tensor in self._live]:
            self._live, self.kept = [], []
            self.add(now)
        elif now:
            torch._foreach_copy_(self.kept, self._live)

    def restore(self, wanted: Tensor | None = None) -> None:
        """Write the copies back: always, or where a 0-dim bool says so; on a GPU nobody waits to know."""
        if wanted is None or not wanted.is_cuda:
            if self._live and (wanted is None or wanted):
                torch._foreach_copy_(self._live, self.kept)
            return
        for live, kept in zip(self._live, self.kept, strict=True):
            chosen = torch.where(wanted, kept.to(wanted.device), live.to(wanted.device))
            live.copy_(chosen, non_blocking=True)


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
        copies = self._copies.setdefault(bucket, Copies())
        copies.refresh(_tensors_of(bucket))
        self._of_step.append(copies)
        return (yield from carried_by(functools.partial(self._complete_copies, bucket, copies), exchange))

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

    def _complete_copies(
        self, bucket: BucketView, copies: Copies, request: Request
    ) -> Generator[Request, Tensor, Tensor]:
        """Copy what the exchange has made by its first request: all state is there, and as it is at first."""
        copies.add(_tensors_of(bucket))
        return (yield request)


def _tensors_of(bucket: BucketView) -> list[Tensor]:
    states = [slot.state for slot in bucket.slots]
    return [tensor for state in states for tensor in (*state.replicated.values(), *state.local.values())]
