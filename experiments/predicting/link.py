"""The link between hosts in the step-time model: the seconds and bytes of a collective.

W ranks run on H = W/R hosts of R ranks each. A collective with a payload of p bytes per rank takes, in seconds,

    wire      = 8 · (data · overhead + 390 · messages) / rate
    processor = seconds_per_byte · bytes sent per rank
    seconds   = max(wire, processor) + hops · latency

summed over its legs. With one rank per host, or with `inner_rate=None`, there is one leg, of all W ranks at rate/R:
data, messages and hops are those of `experiments.links.gloo` (algorithm "gloo"), or those of a ring alone:

    ring            data (bytes per direction)   hops
    all-reduce      2 (W-1)/W · p                2 (W-1)
    reduce-scatter  (W-1)/W · p                  W-1
    all-gather      (W-1) · p                    W-1
    all-to-all      (W-1)/W · p                  1

With a fast link inside hosts there are two. Outside, all ranks of a host exchange their shares with their counterparts,
and these R shares pass the host's uplink together: the collective of H ranks with a payload of p if it is a sum (each
rank holds one R-th of the host's), of R · p otherwise. Inside, at `inner_rate` and without headers:

    inside          data (bytes per direction)   hops
    all-reduce      2 (R-1)/R · p                2 (R-1)    a reduce-scatter before, an all-gather after
    reduce-scatter  (R-1)/R · p                  R-1
    all-gather      (R-1) · H · p                R-1
    all-to-all      (R-1)/W · p                  1

So the uplink of a host carries 2 (H-1)/H · p, (W-R) · p and R · p · (W-R)/W for an all-reduce, an all-gather and an
all-to-all. The legs follow one another: overlap between them is not assumed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Protocol

from commhooks.communicators.collective import KINDS, ring_bytes

from ..links.gloo import MESSAGE_BYTES, Course, course_of

ALGORITHMS = ("gloo", "ring")
HALF_SUM = "all-reduce float16"
"""The kind of a sum of two-byte floats, for which Gloo needs about twice the CPU time per byte of other sums. A `Probe`
measures it separately; a `Link` treats it as any all-reduce."""

OF_PYTORCH = " of PyTorch"
"""The suffix of the kinds of collectives that PyTorch itself runs, over a single group: FSDP2's gathers, for example. A
`Link` with Gloo's algorithms computes their cost."""


def plain_kind(kind: str) -> str:
    """Return the kind of collective: an all-reduce for `HALF_SUM`, and without `OF_PYTORCH`."""
    return "all-reduce" if kind == HALF_SUM else kind.removesuffix(OF_PYTORCH)


class Transfer(NamedTuple):
    """A collective's time and traffic."""

    seconds: float
    processor_seconds: float
    """Seconds of the rank's CPU, part of `seconds`."""
    bytes_sent: int
    """Bytes of data sent per rank, on average over the ranks, including those inside hosts."""
    afterwards: float = 0.0
    """Seconds of CPU time after the answers of its round have arrived, whatever their number."""


class Network(Protocol):
    """The step-time model's interface of a network: a `Link`, computed, or a `Probe`, measured."""

    def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
        """Return the seconds and bytes of a collective with a payload of `payload` bytes per rank."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The link of every host, in both directions, and the hosts' places in the network."""

    rate: float
    """Bits per second of a host's uplink, which all of its ranks share; `math.inf`: no limit."""
    latency: float = 0.0
    """Seconds for each message that waits for another one."""
    ranks_per_host: int = 1
    inner_rate: float | None = None
    """Bits per second of each rank's link inside its host. None: there is none, and a host's ranks reach each other
    through the uplink, which they share equally, as containers with a common network card do."""
    inner_latency: float = 0.0
    """Seconds for each message inside a host that waits for another one."""
    algorithm: str = "gloo"
    """"gloo": Gloo's traffic, with headers and messages; "ring": only the data of rings."""
    hosts_per_site: int | None = None
    """The number of consecutive hosts that share an uplink of their site. A ring crosses it once in each direction."""
    site_rate: float | None = None
    """Bits per second of a site's uplink; if lower than its hosts' rates together, it is oversubscribed."""
    seconds_per_byte: float = 0.0
    """CPU seconds, of the core that computes, per byte that a rank sends. Higher: slower, and less overlap."""
    seconds_per_round: float = 0.0
    """CPU seconds after the answers of a round: threads wait for one another on a core that computes."""

    def __post_init__(self) -> None:
        for name in ("rate", "inner_rate", "site_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"Link({name}={value!r}): {name} must be above zero, in bits per second.")
        for name in ("latency", "inner_latency", "seconds_per_byte", "seconds_per_round"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"Link({name}={value!r}): {name} must be in [0, inf), in seconds.")
        for name in ("ranks_per_host", "hosts_per_site"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"Link({name}={value!r}): {name} must be a whole number of at least 1.")
        if (self.hosts_per_site is None) != (self.site_rate is None):
            raise ValueError(
                f"Link(hosts_per_site={self.hosts_per_site}, site_rate={self.site_rate}): give both, or neither."
            )
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"Link(algorithm={self.algorithm!r}): algorithm must be one of {', '.join(ALGORITHMS)}.")

    def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
        """Return the seconds and bytes of a collective; see the formulas above.

        Raises:
            ValueError: There is no such kind, or the ranks do not fill their hosts.

        """
        is_private = not kind.endswith(OF_PYTORCH)
        kind = plain_kind(kind)
        self._check(kind, ranks)
        if ranks == 1:
            return Transfer(0.0, 0.0, 0)
        legs = self._legs(kind, payload, ranks, is_private=is_private)
        sent = ring_bytes(kind, payload, ranks)
        is_sum_of_rows = kind == "reduce-scatter" and not is_private and self.algorithm == "gloo"
        processor = self.seconds_per_byte * sent * (2 if is_sum_of_rows else 1)  # an all-reduce of each row
        wire = sum(seconds for seconds, _ in legs)
        seconds = max(wire, processor) + sum(delay for _, delay in legs)
        return Transfer(seconds, processor, sent, self.seconds_per_round)

    def _check(self, kind: str, ranks: int) -> None:
        if kind not in KINDS:
            raise ValueError(f"Link.transfer(kind={kind!r}): kind must be one of {', '.join(KINDS)}.")
        per_host = self.ranks_per_host
        if ranks < 1 or (ranks > per_host and ranks % per_host):
            raise ValueError(
                f"{ranks} ranks do not fill hosts of {per_host} ranks: give a multiple of that, or fewer ranks"
            )

    def _legs(self, kind: str, payload: int, ranks: int, *, is_private: bool) -> list[tuple[float, float]]:
        """Return, for each leg, the seconds at its links' rates and the seconds of its latencies."""
        if self.inner_rate is None:
            course = self._course(kind, payload, ranks, is_private=is_private)
            share = self.rate / min(ranks, self.ranks_per_host)
            return [
                (max(_seconds(course, share), self._site(course, kind, payload, ranks)), course.steps * self.latency)
            ]
        legs, inside = [], min(ranks, self.ranks_per_host)
        hosts = ranks // inside
        if inside > 1:
            factor = {"all-gather": hosts, "all-to-all": inside / ranks}.get(kind, 1)
            course = _ring(kind, factor * payload, inside)
            legs.append((_seconds(course, self.inner_rate), course.steps * self.inner_latency))
        if hosts > 1:
            is_sum = kind in {"all-reduce", "reduce-scatter"}
            course = self._course(kind, payload if is_sum else inside * payload, hosts, is_private=is_private)
            course = dataclasses.replace(course, messages=course.messages * inside)
            seconds = max(_seconds(course, self.rate), self._site(course, kind, payload, ranks))
            legs.append((seconds, course.steps * self.latency))
        return legs

    def _course(self, kind: str, payload: int, ranks: int, *, is_private: bool) -> Course:
        if self.algorithm == "ring":
            return _ring(kind, payload, ranks)
        return course_of(kind, payload, ranks, is_private=is_private)

    def _site(self, course: Course, kind: str, payload: int, ranks: int) -> float:
        """Return the seconds that a site's uplink is busy, with a ring's neighbours or with all of the site's ranks."""
        if self.hosts_per_site is None or self.site_rate is None:
            return 0.0
        inside = self.hosts_per_site * self.ranks_per_host
        if inside >= ranks:
            return 0.0
        data = inside * payload * (ranks - inside) / ranks if kind == "all-to-all" else course.up_bytes
        return _seconds(dataclasses.replace(course, up_bytes=data, down_bytes=data), self.site_rate)


def _ring(kind: str, payload: float, ranks: int) -> Course:
    """Return the data of a ring without headers; an all-to-all is direct."""
    others = ranks - 1
    data, hops = {
        "all-reduce": (2 * others / ranks * payload, 2 * others),
        "reduce-scatter": (others / ranks * payload, others),
        "all-gather": (others * payload, others),
        "all-to-all": (others / ranks * payload, 1),
    }[kind]
    return Course(data, data, 0, hops, has_headers=False)


def _seconds(course: Course, rate: float) -> float:
    bytes_in_all = max(course.up_bytes, course.down_bytes) * course.overhead + MESSAGE_BYTES * course.messages
    return 8 * bytes_in_all / rate
