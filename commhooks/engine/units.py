"""Units: the buckets that one exchange averages together.

A bucket takes time beyond that of its elements, for calls, a verdict and messages. A compressor that may is therefore
given several buckets as one, see `Compressor.may_join_buckets`: under "fused" as many as have `UNIT_ELEMENTS`
together, so that larger models are still compressed during the backward pass. Under "fifo" a step's first bucket stays
alone, so that its messages leave as soon as it has come, and others are joined if the last step had the same buckets: a
unit that has begun waits for those that follow.

Where units end depends on the buckets alone, never on time, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.devices import Mark
from commhooks.engine.buckets import Bucket
from commhooks.errors import CollectiveError
from commhooks.language.bucket import BucketView
from commhooks.scheduling.policy import PolicyName

UNIT_ELEMENTS: dict[PolicyName, int] = {"fifo": 1 << 22, "fused": 1 << 24}
"""A unit ends once it has this many elements. Higher: fewer units, but later ones."""


class Handed(NamedTuple):
    """A bucket that has been handed in."""

    bucket: Bucket
    view: BucketView
    future: torch.futures.Future[Tensor]
    ready: Mark | None
    """A mark, on a GPU, behind the work queued before the bucket was handed in, such as its gradients."""


class Units:
    """The division of a step's buckets into units; `joins` allows several buckets in one under "fifo" too."""

    def __init__(self, policy: PolicyName, *, joins: bool) -> None:
        self._is_fused, self._most = policy == "fused", UNIT_ELEMENTS[policy]
        self._joins = joins or self._is_fused
        self._begun: list[Handed] = []
        """The buckets of a unit that has not ended."""
        self._expected: Sequence[Sequence[str]] = ()
        """The parameters of each bucket of the last step, if its last one came."""
        self._now: list[Sequence[str]] = []
        self._is_over = False
        """True once the step's last bucket has come."""
        self.fingerprint: str = f"joined, {UNIT_ELEMENTS}" if joins else "single"

    def expect(self, plan: Sequence[Sequence[str]]) -> None:
        """Expect the buckets of a resumed run's last step, given their parameters' names."""
        self._expected = plan

    def add(self, handed: Handed, *, may_join: bool) -> list[list[Handed]]:
        """Return the units that end with a bucket or before it, in order."""
        self._now.append(handed.view.layout.keys if handed.view.slots else ())
        self._is_over = handed.bucket.is_last()
        begun, self._begun = self._begun, []
        if not (may_join and self._joins):
            return [*([begun] if begun else []), [handed]]
        if begun and not _are_alike(begun[0].view.memory, handed.view.memory):
            return [begun, *self._going_on([handed])]
        return self._going_on([*begun, handed])

    def end_step(self, failure: str) -> None:
        """End a step, whose buckets the next one is expected to bring; fail those of a unit that has not ended.

        Of a step that was cut short, each rank may have seen other buckets, so none are expected.
        """
        for handed in self._begun:
            handed.future.set_exception(CollectiveError(failure))  # type: ignore[arg-type]  # "expected Tensor"
        self._expected = self._now if self._is_over else ()
        self._now, self._begun, self._is_over = [], [], False

    def _going_on(self, unit: list[Handed]) -> list[list[Handed]]:
        """Return a unit that has ended, or nothing: another bucket will be added to it."""
        come, elements = len(self._now), sum(one.view.memory.numel() for one in unit)
        if unit[-1].bucket.is_last() or elements >= self._most:
            return [unit]
        if not self._is_fused:
            is_known = come < len(self._expected) and [*map(tuple, self._expected[:come])] == [*map(tuple, self._now)]
            if come == 1 or not is_known:
                return [unit]
        self._begun = unit
        return []


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device
