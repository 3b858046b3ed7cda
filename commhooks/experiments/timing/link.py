"""Networks in the step-time model: the seconds and bytes of a collective, and a link that is given in numbers.

Over a `Link` a collective with a payload of p bytes per rank takes, in seconds,

    wire      = 8 · (data · overhead + 390 · messages) / rate
    processor = seconds_per_byte · bytes sent per rank
    seconds   = max(wire, processor) + hops · latency

Data, messages and hops are those of `commhooks.experiments.links.gloo` (algorithm "gloo"), or those of a ring alone:

    ring            data (bytes per direction)   hops
    all-reduce      2 (W-1)/W · p                2 (W-1)
    reduce-scatter  (W-1)/W · p                  W-1
    all-gather      (W-1) · p                    W-1
    all-to-all      (W-1)/W · p                  1
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Protocol

from commhooks.communicators.collective import KINDS, ring_bytes
from commhooks.experiments.links.gloo import MESSAGE_BYTES, Course, course_of

ALGORITHMS = ("gloo", "ring")
HALF_SUM = "all-reduce float16"
"""The kind of a sum of float16, for which Gloo needs about twice the CPU time per byte of other sums."""
OF_PYTORCH = " of PyTorch"
"""The suffix of the kinds of collectives that PyTorch itself runs, over a single group: FSDP2's gathers, say."""
LINK_SPREAD = 0.05
"""The relative uncertainty of what a link of given rate and latency adds to a step."""


def plain_kind(kind: str) -> str:
    """Return the kind of collective: an all-reduce for `HALF_SUM`, and without `OF_PYTORCH`."""
    return "all-reduce" if kind == HALF_SUM else kind.removesuffix(OF_PYTORCH)


class Transfer(NamedTuple):
    """A collective's time and traffic."""

    seconds: float
    processor_seconds: float
    """Seconds of the rank's CPU, part of `seconds`."""
    bytes_sent: int
    """Bytes of data sent per rank, on average over the ranks."""
    afterwards: float = 0.0
    """Seconds of CPU time after the answers of its round have arrived, whatever their number."""


class Network(Protocol):
    """The step-time model's interface of a network: a `Link`, computed, or a `Probe`, measured."""

    @property
    def link(self) -> str:
        """The network's name, as the user gave it."""
        ...

    def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
        """Return the seconds and bytes of a collective with a payload of `payload` bytes per rank."""
        ...

    def spread(self, kind: str) -> float:
        """Return the relative uncertainty of the time of collectives of a kind."""
        ...


class NoLink:
    """A network on which collectives take no time."""

    link = ""

    def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
        """Return no time at all."""
        return Transfer(0.0, 0.0, ring_bytes(plain_kind(kind), payload, ranks))

    def spread(self, kind: str) -> float:
        """Return 0: nothing is uncertain about it."""
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A link between ranks of which each has its own to the network, the same in both directions."""

    rate: float
    """Bits per second; `math.inf`: no limit."""
    latency: float = 0.0
    """Seconds for each message that waits for another one: half of what `ping` reports."""
    algorithm: str = "gloo"
    """"gloo": Gloo's traffic, with headers and messages; "ring": only the data of rings."""
    seconds_per_byte: float = 0.0
    """CPU seconds, of the core that computes, per byte that a rank sends. Higher: slower, and less overlap."""
    seconds_per_half_byte: float | None = None
    """The same for sums of float16; None: as for all others."""
    seconds_per_round: float = 0.0
    """CPU seconds after the answers of a round: threads wait for one another on a core that computes."""
    link: str = ""
    """The link's name, as the user gave it."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"Link(rate={self.rate!r}): rate must be above zero, in bits per second.")
        for name in ("latency", "seconds_per_byte", "seconds_per_half_byte", "seconds_per_round"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"Link({name}={value!r}): {name} must be in [0, inf), in seconds.")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"Link(algorithm={self.algorithm!r}): algorithm must be one of {', '.join(ALGORITHMS)}.")

    def spread(self, kind: str) -> float:
        """Return the relative uncertainty of computed times."""
        return LINK_SPREAD

    def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
        """Return the seconds and bytes of a collective; see the formulas above.

        Raises:
            ValueError: There is no such kind, or there are no ranks.

        """
        plain, is_private = plain_kind(kind), not kind.endswith(OF_PYTORCH)
        if plain not in KINDS:
            raise ValueError(f"Link.transfer(kind={kind!r}): kind must be one of {', '.join(KINDS)}.")
        if ranks < 1:
            raise ValueError(f"Link.transfer(ranks={ranks}): ranks must be at least 1.")
        if ranks == 1:
            return Transfer(0.0, 0.0, 0)
        is_gloo = self.algorithm == "gloo"
        course = course_of(plain, payload, ranks, is_private=is_private) if is_gloo else _ring(plain, payload, ranks)
        sent = ring_bytes(plain, payload, ranks)
        is_half = kind == HALF_SUM and self.seconds_per_half_byte is not None
        a_byte = self.seconds_per_half_byte or 0.0 if is_half else self.seconds_per_byte
        is_sum_of_rows = plain == "reduce-scatter" and not is_private and is_gloo
        processor = a_byte * sent * (2 if is_sum_of_rows else 1)  # an all-reduce of each row
        on_link = max(course.up_bytes, course.down_bytes) * course.overhead + MESSAGE_BYTES * course.messages
        seconds = max(8 * on_link / self.rate, processor) + course.steps * self.latency
        return Transfer(seconds, processor, sent, self.seconds_per_round)


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
