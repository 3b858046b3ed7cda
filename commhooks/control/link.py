"""The link between ranks, as a rate and a latency; the time of collectives on it is that of a ring.

Collectives that send `data` bytes per rank (`ring_bytes`), in `hops` messages that wait for one another (`hops_of`),
take `8 · data / rate + hops · latency` seconds. The rate is an effective one, fitted to all-reduces that were timed:
headers, and whatever else a backend sends, are part of it.
"""

from __future__ import annotations

import dataclasses

from commhooks.communicators.collective import ring_bytes
from commhooks.errors import SettingsError
from commhooks.units import three_digits

SMALL = 4
"""The payload of a probe's first all-reduce, in bytes."""
_PROBE_SHARE = 1 / 32  # of a step, that a probe should take
_LEAST, _MOST = 1 << 14, 1 << 22  # bytes of its second all-reduce


@dataclasses.dataclass(frozen=True)
class Link:
    """The link of each rank, in both directions."""

    rate: float
    """Bits per second."""
    latency: float
    """Seconds of each message that waits for another one."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise SettingsError(f"Link(rate={self.rate!r}): rate must be above 0, in bits per second.")

    def __str__(self) -> str:
        """Return the rate in words."""
        unit, size = ("Gbit/s", 1e9) if self.rate >= 1e9 else ("Mbit/s", 1e6)
        return f"{three_digits(self.rate / size)} {unit}"

    def seconds(self, data: float, hops: float) -> float:
        """Return the seconds of collectives; see the formula above."""
        return 8 * data / self.rate + hops * self.latency


def hops_of(kind: str, ranks: int) -> int:
    """Return the number of a collective's messages that wait for one another."""
    return {"all-to-all": 1, "all-reduce": 2 * (ranks - 1)}.get(kind, ranks - 1)


def link_of(seconds_of_small: float, seconds: float, payload: int, ranks: int) -> Link:
    """Fit a link to the seconds of two all-reduces, of `SMALL` and of `payload` bytes."""
    small, large = (ring_bytes("all-reduce", size, ranks) for size in (SMALL, payload))
    transfer = max(seconds - seconds_of_small, 0.1 * seconds)  # noise may make the large one the faster
    rate = 8 * (large - small) / transfer
    return Link(rate, max(0.0, seconds_of_small - 8 * small / rate) / hops_of("all-reduce", ranks))


def probe_bytes(link: Link | None, seconds: float, ranks: int) -> int:
    """Return the payload of a probe's second all-reduce, for a step of these seconds on a link; few on an unknown one.

    It takes a small part of the step.
    """
    if link is None:
        return _LEAST
    payload = link.rate / 8 * seconds * _PROBE_SHARE * ranks / (2 * (ranks - 1))
    return round(min(_MOST, max(_LEAST, payload)))
