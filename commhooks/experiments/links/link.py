"""The link between ranks: its settings, and its emulation on one machine, without root.

With an emulated link, a real collective runs between the ranks; in addition, each rank waits until a link of the given
rate and latency could have carried Gloo's messages for it (`communicators/gloo.py`), with the headers of their packets.
The link is a serial resource: a transfer starts when the previous one is through. So a transfer may overlap with
compute, but two transfers never share the rate. Everything that a rank sends passes one `Wire`, whoever starts it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from commhooks.experiments.links.gloo import MESSAGE_BYTES, NOTHING, Course, course_of
from commhooks.experiments.links.text import (
    LINK_KINDS,
    Schedule,
    fields_in,
    format_rate,
    parse_latency,
    parse_rate,
    text_of,
)

if TYPE_CHECKING:
    from commhooks.communicators import Collective, Communicator, Pending

__all__ = ["EmulatedLink", "LinkSettings", "Wire", "format_rate", "parse_latency", "parse_rate"]


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """The link of every rank: its kind, its rates and its latency.

    "emulated": this machine, without root. "hosts": network namespaces of this machine, whose links are shaped; needs
    root. "real": the existing network between the ranks, whose rate is not set here.
    """

    kind: str = "emulated"
    bits_per_second: float | None = None  # lower: every collective takes longer; None: no limit
    down_bits_per_second: float | None = None  # the rate at which a rank receives; None: the rate at which it sends
    latency_seconds: float = 0.0  # higher: many small collectives cost more
    schedule: Schedule = ()  # (seconds since the run began, the rate in both directions from then on), in order
    framing: bool = True  # False: rates count data alone, without the headers of packets and of Gloo's messages

    def __post_init__(self) -> None:
        # JSON has neither tuples nor a difference between 30 and 30.0.
        schedule = tuple((float(seconds), rate) for seconds, rate in self.schedule)
        object.__setattr__(self, "schedule", schedule)
        if self.kind not in LINK_KINDS:
            raise ValueError(f"LinkSettings(kind={self.kind!r}): kind must be one of {', '.join(LINK_KINDS)}.")
        for name in ("bits_per_second", "down_bits_per_second"):
            if not _is_rate(getattr(self, name)):
                raise ValueError(f"LinkSettings({name}={getattr(self, name)}): {name} must be in (0, inf), or None.")
        if not 0 <= self.latency_seconds < math.inf:
            raise ValueError(
                f"LinkSettings(latency_seconds={self.latency_seconds}): latency_seconds must be in [0, inf)."
            )
        times = [0.0, *(seconds for seconds, _ in schedule)]
        in_order = all(earlier < later < math.inf for earlier, later in itertools.pairwise(times))
        if not in_order or not all(_is_rate(rate) for _, rate in schedule):
            raise ValueError(
                f"LinkSettings(schedule={self.schedule}): schedule must list (seconds, bits per second), with seconds "
                "above zero and ascending, and rates in (0, inf), or None."
            )
        if schedule and self.down_bits_per_second is not None:
            raise ValueError(
                "LinkSettings: rates that change over time hold for both directions; leave out down_bits_per_second "
                f"(got {self.down_bits_per_second}) or the schedule (got {self.schedule})."
            )
        self._check_kind()

    def _check_kind(self) -> None:
        """Raise ValueError if this kind of link cannot have these settings."""
        refused: dict[str, object] = {}
        if self.kind == "real":
            why = (
                "it is used as it is, over NCCL between GPUs; an emulated rate waits on the host, and so needs Gloo, "
                "also on GPUs"
            )
            refused["rate"] = self.bits_per_second or self.down_bits_per_second or self.schedule
        if self.kind == "hosts":
            why = "tc limits the rates of hosts, and for delays it needs netem, which many kernels lack"
        if self.kind != "emulated":
            refused |= {"latency": self.latency_seconds, "framing": not self.framing}
        for what, asked in refused.items():
            if asked:
                raise ValueError(f"a link of kind {self.kind!r} takes no {what}: {why}. Use kind 'emulated' for that.")

    @classmethod
    def parse(cls, text: str) -> LinkSettings:
        """Return the link described by a text such as '20Mbit/s,down=100Mbit/s,latency=5ms'.

        The text is a kind and a colon, unless the link is emulated, and then `key=value` pieces, separated by commas:
        rate, down, latency, framing. A rate in the first place needs no key. '100Mbit/s+10Mbit/s@30s' is 10 Mbit/s from
        the 30th second of the run on. 'unlimited', 'hosts' and 'real' are links that are not limited here.

        Raises:
            ValueError: The text does not have that form, or that kind of link cannot have these settings.

        """
        return cls(**fields_in(text))

    @property
    def label(self) -> str:
        """The shortest text that `parse` reads as this link."""
        return text_of(vars(self))

    @property
    def is_limited(self) -> bool:
        """True if something here makes the link slower: its emulation, or hosts whose rates are shaped."""
        return self.kind == "hosts" or (self.kind == "emulated" and self != LinkSettings(framing=self.framing))

    @property
    def slowest(self) -> float | None:
        """The lowest rate that the link ever has in either direction, in bits per second; None: it has no limit."""
        rates = [self.bits_per_second, self.down_bits_per_second, *(rate for _, rate in self.schedule)]
        return min((rate for rate in rates if rate is not None), default=None)

    def slowed(self, factor: float) -> LinkSettings:
        """Return this link in slow motion: a transfer of one second takes `factor` seconds.

        Its rates are divided, and its latency and the times of its schedule multiplied.
        """
        if not 0 < factor < math.inf:
            raise ValueError(f"LinkSettings.slowed({factor}): the factor must be in (0, inf).")
        return dataclasses.replace(
            self,
            bits_per_second=_divided(self.bits_per_second, factor),
            down_bits_per_second=_divided(self.down_bits_per_second, factor),
            latency_seconds=self.latency_seconds * factor,
            schedule=tuple((seconds * factor, _divided(rate, factor)) for seconds, rate in self.schedule),
        )

    def seconds_for(self, collective: Collective, world_size: int, *, at: float = 0.0) -> float:
        """Return the least time that Gloo needs over this link, if `world_size` ranks take part.

        `at` is the second of the run at which the collective begins. The link connects machines: transfers inside a
        machine take no time on it.
        """
        return self.seconds_of(_course_of(collective, world_size), at=at)

    def seconds_of(self, course: Course, *, at: float = 0.0) -> float:
        """Return the least seconds for a course over this link, if it begins `at` seconds after the run's begin."""
        overhead, for_messages = (course.overhead, MESSAGE_BYTES * course.messages) if self.framing else (1.0, 0)
        up_bits = 8 * (course.up_bytes * overhead + for_messages)
        down_bits = 8 * (course.down_bytes * overhead + for_messages)
        pieces = ((0.0, self.bits_per_second), *self.schedule)
        now, left = at, 1.0  # of the course
        for (_, up), (end, _) in zip(pieces, (*pieces[1:], (math.inf, None)), strict=True):
            down = self.down_bits_per_second or up
            seconds = max(up_bits / up if up else 0.0, down_bits / down if down else 0.0)  # for the whole course
            if now + left * seconds <= end:
                return now + left * seconds - at + course.steps * self.latency_seconds
            if now < end:
                now, left = end, left - (end - now) / seconds
        raise AssertionError("the last piece has no end")


class Wire:
    """One rank's end of an emulated link: everything that the rank sends queues here.

    A link of another kind takes real time by itself, so it takes none here.
    """

    def __init__(
        self,
        link: LinkSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.link = link
        self.clock = clock
        self.sleep = sleep
        self._lock = threading.Lock()
        self._began: float | None = None
        self._paused_at: float | None = None
        self._free_at = -math.inf

    def start_clock(self, elapsed: float = 0.0) -> None:
        """Begin the run to which the link's schedule refers; without this call, the first transfer begins it.

        Args:
            elapsed: Seconds that the run lasted already, in other processes.

        """
        with self._lock:
            self._began = self.clock() - elapsed

    def pause(self) -> None:
        """Stop the run's clock until `resume`: other runs take their turns."""
        with self._lock:
            self._paused_at = self.clock()

    def resume(self) -> None:
        """Start the run's clock again."""
        with self._lock:
            if self._paused_at is not None and self._began is not None:
                self._began += self.clock() - self._paused_at
            self._paused_at = None

    def carry(self, course: Course) -> float:
        """Queue a collective's course, and return the time on the clock at which it will be through."""
        with self._lock:
            now = self.clock()
            if self._began is None:
                self._began = now
            if self.link.kind != "emulated" or course == NOTHING:
                return now
            begin = max(now, self._free_at)
            self._free_at = begin + self.link.seconds_of(course, at=begin - self._began)
            return self._free_at

    def sleep_until(self, moment: float) -> None:
        """Return at this time on the clock, or at once if it is past."""
        self.sleep(max(0.0, moment - self.clock()))


class EmulatedLink:
    """A wrapper of a communicator that makes every collective last at least as long as it takes on the link.

    Transfers queue: each begins when it has been requested and the link is free. Waiting sleeps, and so leaves the
    processor to the backward pass. A real collective that is slower than the link stays slower. `link` is the link's
    settings, or the `Wire` through which this rank sends other things too.
    """

    def __init__(
        self,
        inner: Communicator,
        link: LinkSettings | Wire,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._wire = link if isinstance(link, Wire) else Wire(link, clock=clock, sleep=sleep)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._inner.world_size

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._inner.rank

    def start_clock(self) -> None:
        """Begin the run to which the link's schedule refers; see `Wire.start_clock`."""
        self._wire.start_clock()

    def start(self, collective: Collective) -> Pending:
        """Start the collective, and queue its bytes on the link."""
        arrival = self._wire.carry(_course_of(collective, self.world_size))
        return _InTransit(self._inner.start(collective), arrival, self._wire)


class _InTransit:
    """A collective that is complete once the real one is done and the link has carried its bytes."""

    def __init__(self, inner: Pending, arrival: float, wire: Wire) -> None:
        self._inner = inner
        self._arrival = arrival
        self._wire = wire

    @property
    def result(self) -> Tensor:
        """The inner answer."""
        return self._inner.result

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when both are done; raise TimeoutError if the timeout passes first, as every Pending does."""
        deadline = math.inf if timeout_seconds is None else self._wire.clock() + timeout_seconds
        self._inner.wait(timeout_seconds)
        if self._arrival > deadline:
            self._wire.sleep_until(deadline)
            raise TimeoutError(f"the emulated link has not carried the collective's bytes after {timeout_seconds} s")
        self._wire.sleep_until(self._arrival)


def _course_of(collective: Collective, world_size: int) -> Course:
    if collective.group is not None and collective.group.kind == "inner":
        return NOTHING
    ranks = collective.ranks_in(world_size)
    return course_of(collective.kind, collective.payload_bytes, ranks, is_sparse=collective.tensor.is_sparse)


def _is_rate(rate: float | None) -> bool:
    return rate is None or 0 < rate < math.inf


def _divided(rate: float | None, factor: float) -> float | None:
    return None if rate is None else rate / factor
