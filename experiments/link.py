"""A link with a given rate, emulated on one machine without root.

A real collective runs between the ranks; in addition, the rank waits until the bytes that a ring would have moved could
have passed a link of the given rate and latency. The link is a serial resource: a transfer starts when the previous one
is through. So a transfer may overlap with compute, but two transfers never share the rate.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from commhooks.communicators import Collective, Communicator, Pending

_QUANTITY = re.compile(r"\s*(?P<number>\d+\.?\d*|\.\d+)\s*(?P<prefix>[kKmMgGtT]?)(?P<unit>\S+)\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BITS = {"bit/s", "bits/s", "bit", "bps", "b/s"}
_BYTES = {"Byte/s", "Bytes/s", "byte/s", "bytes/s", "Bps", "B/s"}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NO_LIMIT = {"unlimited", "none", "inf"}


def parse_rate(text: str) -> float | None:
    """Return the bits per second in a text such as '100Mbit/s', '1.5 Gbps' or '12.5 MB/s'.

    'unlimited' is None. Units are decimal: 1 kbit is 1,000 bit. A small b is a bit, a capital B a byte.

    Raises:
        ValueError: The text is not a positive number followed by a unit of rate.

    """
    if text.strip().lower() in _NO_LIMIT:
        return None
    match = _QUANTITY.fullmatch(text)
    bits = _bits_of(match["unit"]) if match else None
    if match is None or bits is None:
        raise ValueError(
            f"rate {text!r} does not parse: expected a number and a unit, such as '100Mbit/s', '1.5 Gbps', '12.5 MB/s' "
            "or 'unlimited' (units are decimal; b is a bit, B a byte)"
        )
    rate = float(match["number"]) * _PREFIXES[match["prefix"].lower()] * bits
    if rate <= 0:
        raise ValueError(f"rate {text!r} must be above zero; for a link without a limit write 'unlimited'")
    return rate


def parse_latency(text: str) -> float:
    """Return the seconds in a text such as '0.2ms', '50us', '1s' or '0'.

    Raises:
        ValueError: The text is not a number of at least zero followed by a unit of time.

    """
    if text.strip() == "0":
        return 0.0
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(s|ms|us|µs|ns)\s*", text)
    if match is None:
        raise ValueError(
            f"latency {text!r} does not parse: expected a number and a unit, such as '0.2ms', '50us', '1s' or '0'"
        )
    return float(match[1]) * _SECONDS[match[2]]


def format_rate(bits_per_second: float | None) -> str:
    """Return the rate in a readable form: '100 Mbit/s'."""
    if bits_per_second is None:
        return "unlimited"
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:g} {prefix}bit/s"
    return f"{bits_per_second:g} bit/s"


def _bits_of(unit: str) -> int | None:
    """Return the number of bits in this unit; None for an unknown unit."""
    if unit in _BYTES:
        return 8
    return 1 if unit in _BITS or unit.lower() in {"bit/s", "bits/s", "bit"} else None


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """The link between one rank and the next in the ring."""

    kind: str = "emulated"  # or "hosts" (network namespaces), or "real" (whatever network there is)
    bits_per_second: float | None = None  # lower: every collective takes longer; None: no limit
    latency_seconds: float = 0.0  # higher: many small collectives cost more

    def __post_init__(self) -> None:
        if self.bits_per_second is not None and not 0 < self.bits_per_second < math.inf:
            raise ValueError(
                f"LinkSettings(bits_per_second={self.bits_per_second}): bits_per_second must be in (0, inf), or None."
            )
        if not 0 <= self.latency_seconds < math.inf:
            raise ValueError(
                f"LinkSettings(latency_seconds={self.latency_seconds}): latency_seconds must be in [0, inf)."
            )

    @classmethod
    def parse(cls, text: str) -> LinkSettings:
        """Return the link described by a text such as '100Mbit/s' or 'hosts:rate=100Mbit/s,latency=1ms'."""
        kind, colon, rest = text.partition(":")
        if not colon:
            kind, rest = ("real", "") if text == "real" else ("emulated", f"rate={text}")
        values = dict(piece.split("=") for piece in rest.split(",") if piece)
        return cls(
            kind=kind,
            bits_per_second=parse_rate(values.get("rate", "unlimited")),
            latency_seconds=parse_latency(values.get("latency", "0")),
        )

    @property
    def label(self) -> str:
        """The shortest text that parses to this link."""
        rate = format_rate(self.bits_per_second).replace(" ", "")
        latency = f",latency={1e3 * self.latency_seconds:g}ms" if self.latency_seconds else ""
        return "real" if self.kind == "real" else f"{self.kind}:rate={rate}{latency}"

    @property
    def slowest(self) -> float | None:
        """The lowest rate that the link ever has, in bits per second; None: no limit."""
        return self.bits_per_second

    def slowed(self, factor: float) -> LinkSettings:
        """Return the link with every rate divided and every latency multiplied by the factor."""
        rate = None if self.bits_per_second is None else self.bits_per_second / factor
        return replace(self, bits_per_second=rate, latency_seconds=self.latency_seconds * factor)

    def seconds_for(self, collective: Collective, world_size: int) -> float:
        """Return the minimum time for the ring of those of `world_size` ranks that take part, over this link.

        The link connects machines: transfers inside a machine take no time on it.
        """
        ranks = collective.ranks_in(world_size)
        if ranks == 1 or (collective.group is not None and collective.group.kind == "inner"):
            return 0.0
        for_bytes = 8 * collective.ring_bytes(world_size) / self.bits_per_second if self.bits_per_second else 0.0
        return for_bytes + ring_steps(collective, ranks) * self.latency_seconds


def ring_steps(collective: Collective, world_size: int) -> int:
    """Return how many times a ring passes a message on for this collective: an all-reduce goes around twice."""
    rounds = 2 if collective.kind == "all-reduce" else 1
    return rounds * (world_size - 1)


class EmulatedLink:
    """A wrapper of a communicator that makes every collective last at least as long as its bytes take on the link.

    Transfers queue: each begins when it has been requested and the link is free. Waiting sleeps, and so leaves the
    processor to the backward pass. A real collective that is slower than the link stays slower.
    """

    def __init__(
        self,
        inner: Communicator,
        link: LinkSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._link = link
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = -math.inf

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._inner.world_size

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self._inner.rank

    def start(self, collective: Collective) -> Pending:
        """Start the collective, and queue its bytes on the link."""
        with self._lock:
            begin = max(self._clock(), self._free_at)
            self._free_at = begin + self._link.seconds_for(collective, self.world_size)
            arrival = self._free_at
        return _InTransit(self._inner.start(collective), arrival, self._clock, self._sleep)


class _InTransit:
    """A collective that is complete once the real one is done and the link has carried its bytes."""

    def __init__(
        self, inner: Pending, arrival: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._inner = inner
        self._arrival = arrival
        self._clock = clock
        self._sleep = sleep

    @property
    def result(self) -> Tensor:
        """The inner answer."""
        return self._inner.result

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when both are done; raise TimeoutError if the timeout passes first, as every Pending does."""
        deadline = math.inf if timeout_seconds is None else self._clock() + timeout_seconds
        self._inner.wait(timeout_seconds)
        if self._arrival > deadline:
            self._sleep(max(0.0, deadline - self._clock()))
            raise TimeoutError(f"the emulated link has not carried the collective's bytes after {timeout_seconds} s")
        self._sleep(max(0.0, self._arrival - self._clock()))
