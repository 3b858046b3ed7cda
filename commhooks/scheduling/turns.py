"""Whose turn it is on a connection of several channels on NCCL, without a wait of the host for each unit.

Before each unit the ranks gather headers, see `ConnectionChannels`. If the unit comes where it came in the last round,
it is issued at once, and the host reads the gathered headers later. As long as all headers were equal, every rank has
the same order, so of ranks that differ all but those of one unit depart from it: they wait, raise, and issue nothing.
No two different units ever meet. A rank that did not depart has issued a unit that the others do not answer, or answer
with something else: the device makes its means NaN.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.devices import Mark, copied_to, copied_to_host
from commhooks.language.bucket import BucketView

_UNITS_TO_KEEP = 2**14
"""The longest round, in units, that is surely recognised; units of a longer one may be waited for."""
_PLACES_TO_TRY = 2**10
"""Earlier occurrences of a unit at most that are compared if it was not expected; more often in a round, it may be
waited for."""
_SURELY = 64
"""Units that repeat a short round for certain."""
_MOST_UNREAD = 2048
"""Headers that the host leaves unread at most, each in pinned memory of its own."""


_LOOKS_IN_A_ROW = 2000
"""So often the host looks whether headers have come before it rests in between, for `_REST_SECONDS`."""
_REST_SECONDS = 0.0005


class Turn(NamedTuple):
    """A unit, as it repeats from round to round."""

    channel: int
    steps: int
    """The number of its channel's steps since the channel's last unit."""
    bucket: int


class Order:
    """The order of the units so far, and the place in it that the next unit is expected to repeat."""

    def __init__(self) -> None:
        self._units: list[Turn] = []
        self._after: dict[Turn, list[int]] = {}
        """The places after each occurrence of a unit."""
        self._steps: dict[int, int] = {}
        self._expected: int | None = None

    def follow(self, channel: int, step: int, bucket: int) -> int:
        """Add a unit; return the length of a round if it comes where it came in the last one, otherwise 0."""
        turn = Turn(channel, step - self._steps.get(channel, step - 1), bucket)
        self._steps[channel] = step
        units, place = self._units, self._expected
        is_expected = place is not None and units[place] == turn
        units.append(turn)
        self._expected = place + 1 if place is not None and is_expected else self._after_best_match()
        self._note(turn, len(units))
        if len(units) > 2 * _UNITS_TO_KEEP:
            self._forget(_UNITS_TO_KEEP)
        return len(units) - self._expected if is_expected and self._expected is not None else 0

    def _after_best_match(self) -> int | None:
        """Return the place after what the last units seem to repeat; None if the last one is new.

        It is the longest match, of those that repeat a whole round if there are any: what went before an irregular
        step also matches all since, however often the round has been repeated since then.
        """
        units, end = self._units, len(self._units)
        best, after = (False, 0), None
        for place in itertools.islice(reversed(self._after.get(units[-1], [])), _PLACES_TO_TRY):
            distance = end - place
            enough = max(2 * distance, _SURELY)
            length = 1
            while length < min(place, enough) and units[place - 1 - length] == units[end - 1 - length]:
                length += 1
            if length == enough:  # look no further: the cost of a unit must not grow with the history
                return place
            if (match := (length >= distance, length)) > best:
                best, after = match, place
        return after

    def _note(self, turn: Turn, after: int) -> None:
        self._after.setdefault(turn, []).append(after)

    def _forget(self, count: int) -> None:
        """Forget the first units."""
        del self._units[:count]
        self._after.clear()
        for place, turn in enumerate(self._units):
            self._note(turn, place + 1)
        kept = -1 if self._expected is None else self._expected - count
        self._expected = kept if kept >= 0 else None


class _Headers(NamedTuple):
    """The headers of one unit, on their way to the host."""

    own: Tensor
    of_ranks: Tensor
    arrived: Mark | None
    """Reached when `of_ranks` can be read; None if it can be read at once."""

    def have_arrived(self) -> bool:
        return self.arrived is None or self.arrived.query()


class Turns:
    """Headers that the host has yet to read.

    `compare` raises if a rank's header differs from this one's; `look_around` is called while the host waits.
    """

    def __init__(self, compare: Callable[[Tensor, Tensor], None], look_around: Callable[[], None]) -> None:
        self._compare = compare
        self._look_around = look_around
        self._order = Order()
        self._unread: deque[_Headers] = deque()

    def take(self, own: Tensor, sent: Tensor, of_ranks: Tensor) -> Tensor | None:
        """Read a unit's gathered headers now, and return None; or later, and return whether any differs, on the device.

        `sent` is this rank's header on the device. Headers are read late if the unit comes where it came in the last
        round. About once a round, the host then waits for those that were gathered at least a round ago.
        """
        _, channel, step, bucket = own.tolist()
        length = self._order.follow(channel, step, bucket)
        self._unread.append(_Headers(own, *copied_to_host(of_ranks)))
        most = min(2 * length, _MOST_UNREAD)
        if len(self._unread) > most:
            self.read(most // 2)
        return (of_ranks != sent).any() if length else None

    def look(self) -> None:
        """Compare the headers that have arrived."""
        self.read(len(self._unread))

    def read(self, leaving: int = 0, look_around: Callable[[], None] | None = None) -> None:
        """Compare headers in order, as far as they have arrived; wait until at most so many are left.

        Each is compared before the next is waited for: after ranks have differed, the next may never arrive.
        """
        looks = 0
        while self._unread:
            if self._unread[0].have_arrived():
                own, of_ranks, _ = self._unread.popleft()
                self._compare(own, of_ranks)
            elif len(self._unread) <= leaving:
                return
            else:
                (look_around or self._look_around)()
                time.sleep(_REST_SECONDS if looks > _LOOKS_IN_A_ROW else 0)
                looks += 1


def spoil(bucket: BucketView, differs: Tensor) -> None:
    """Make the first element of each parameter's mean NaN if a 0-dim bool is true, without the host's knowing it."""
    mean = bucket.mean
    if mean.is_sparse:
        mean._values().masked_fill_(differs, math.nan)
        return
    firsts = bucket.plan(spoil, functools.partial(_firsts, bucket))
    elements = mean.view(-1)
    elements.index_copy_(0, firsts, elements.index_select(0, firsts).masked_fill_(differs, math.nan))


def _firsts(bucket: BucketView) -> Tensor:
    """Return the place in the mean of each parameter's first element; in a gather's, those of rank 0's shards."""
    if bucket.slots:
        begin = bucket.mean.storage_offset()
        places = [slot.mean.storage_offset() - begin for slot in bucket.slots if slot.mean.numel()]
    else:
        sizes = bucket.layout.sizes
        firsts = itertools.accumulate(sizes, initial=0)
        places = [first for first, size in zip(firsts, sizes, strict=False) if size]
    return copied_to(bucket.mean.device, torch.tensor(places, dtype=torch.int64, device="cpu"))
