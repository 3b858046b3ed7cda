"""The cost of compression, measured in a running hook: seconds and messages of each bucket in each round.

The compressor is wrapped, and so is the communicator. Between them they see each time the worker thread begins or ends
something: it runs a compressor up to its next request (a *segment*), packs the request, starts it, takes the answers
and unpacks them. The time between two such events belongs to one bucket and round.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Generator
from typing import Any

import torch

from commhooks.communicators import Collective
from commhooks.experiments.devices import Moment, Stopwatch
from commhooks.experiments.timing.link import HALF_SUM
from commhooks.experiments.timing.step_time import Sends
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Context, Exchange, begin_exchange, map_requests
from commhooks.language.requests import Asked, Judge, Request
from commhooks.wrappers.wrapper import Wrapper


@dataclasses.dataclass
class BucketRecord:
    """One bucket in one step, or several that were averaged as one."""

    parameters: tuple[str, ...]
    bytes: int
    submitted: Moment
    """The moment at which it was handed in; in seconds of the wall clock once the step is over."""
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Seconds of compression in each round."""
    sends: list[Sends] = dataclasses.field(default_factory=list)
    after: float = 0.0
    """Seconds since the last round began; at the end, seconds after the last answer."""


class Segments:
    """The buckets of a step under one attachment, as the worker thread handles them.

    `submitted` is called by the training thread, everything else by the worker thread.
    """

    def __init__(self, clock: Callable[[], float], stopwatch: Stopwatch | None = None) -> None:
        self._stopwatch = stopwatch or Stopwatch()
        self._clock = clock  # of compression: the processor's if the training thread shares a core with the worker
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step."""
        self.buckets: list[BucketRecord] = []
        self.own_seconds: float = 0.0
        self._unpacking = 0.0  # seconds of taking answers, which belong to the bucket that is resumed next
        self._last: tuple[str, float] = ("", 0.0)  # what ended last on the worker thread, and when
        self._asking: list[int] = []  # buckets whose requests are not on their way
        self._begun = 0.0

    def submitted(self, view: BucketView) -> int:
        """Add a bucket, and return its number."""
        now = time.perf_counter()
        names = tuple(slot.name for slot in view.slots)
        size = sum(member.memory.numel() for member in view.members) * view.memory.element_size()
        self.buckets.append(BucketRecord(names, size, self._stopwatch.now()))
        self.own_seconds += time.perf_counter() - now
        return len(self.buckets) - 1

    def end_step(self) -> None:
        """Turn moments into seconds, once the device has reached them."""
        for bucket in self.buckets:
            bucket.submitted = self._stopwatch.seconds_at(bucket.submitted)

    def begin(self, number: int) -> None:
        """Begin a segment of a bucket. What came right before it, answers and a verdict, belongs to it."""
        entered = time.perf_counter()
        what, since = self._last
        bucket = self.buckets[number]
        if what in ("answered", "judge"):
            bucket.after += self._unpacking + self._clock() - since
            self._unpacking = 0.0
        if number in self._asking:
            self._asking.remove(number)
        now = time.perf_counter()
        self.own_seconds += now - entered
        self._begun = self._clock()

    def end(self, number: int, asked: Asked | None) -> None:
        """End the segment of a bucket, which asks for something, or for nothing any more."""
        clock, now = self._clock(), time.perf_counter()
        bucket = self.buckets[number]
        bucket.after += clock - self._begun
        sends = () if asked is None or isinstance(asked, Judge) else sends_of(asked)
        if sends:
            bucket.seconds.append(bucket.after)
            bucket.sends.append(sends)
            bucket.after = 0.0
            self._asking.append(number)
        self.own_seconds += time.perf_counter() - now
        self._last = ("judge" if isinstance(asked, Judge) else "asked" if sends else "", self._clock())

    def starting(self, collective: Collective) -> None:
        """Add the packing that precedes a collective to the round of the first bucket that is in it."""
        clock, now = self._clock(), time.perf_counter()
        if self._asking and self._last[0] != "started":
            number = self._asking.pop(0)
            self.buckets[number].seconds[-1] += self._unpacking + clock - self._last[1]
            self._unpacking = 0.0
        self.own_seconds += time.perf_counter() - now

    def has_started(self) -> None:
        """End the start of a collective."""
        self._last = ("started", self._clock())

    def answered(self) -> None:
        """Begin to take an answer."""
        clock = self._clock()
        if self._last[0] == "answered":
            self._unpacking += clock - self._last[1]
        self._last = ("answered", clock)


def sends_of(asked: Asked) -> Sends:
    """Return the kinds and payloads of the requests for which something is sent."""
    if isinstance(asked, Judge):
        return ()
    requests = asked if isinstance(asked, tuple) else (asked,)
    if all(request.is_empty for request in requests):
        return ()
    return tuple((_kind_of(request), sum(request.part_bytes)) for request in requests if not request.is_empty)


def _kind_of(request: Request) -> str:
    """Return the kind; of sums of float16, one of their own."""
    wires = {part.on_wire for part in request.parts}
    is_half = request.kind == "all-reduce" and wires == {torch.float16}
    return HALF_SUM if is_half else request.kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched(Wrapper):
    """A compressor whose segments are recorded."""

    segments: Segments = dataclasses.field(repr=False, compare=False)

    def may_join_buckets(self, step: int) -> bool:
        """Defer to `inner`."""
        return self.inner.may_join_buckets(step)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Return `inner`'s exchange. This is called in the hook's own call, so the bucket is ready now."""
        number = self.segments.submitted(bucket)
        return self._run(number, begin_exchange(self.inner, bucket, context))

    def _run(self, number: int, exchange: Exchange) -> Exchange:
        self.segments.begin(number)
        yield from map_requests(functools.partial(self._carry, number), exchange)
        self.segments.end(number, None)

    def _carry(self, number: int, asked: Asked) -> Generator[Asked, Any, Any]:
        self.segments.end(number, asked)
        answer = yield asked
        self.segments.begin(number)
        return answer
