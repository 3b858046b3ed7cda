"""The costs of Gloo's collectives: the data, messages and hops of a rank.

Gloo's algorithms, as PyTorch 2.13 calls them:

- all-reduce: around a ring, as a reduce-scatter and an all-gather. Each rank's share is sent in two halves, so that one
  is sent while the other is added up.
- all-gather: around a ring, in halves too.
- reduce-scatter: an all-reduce of every rank's row, of which a rank keeps its own: twice the bytes of a ring. Private
  groups carry an all-to-all of the rows instead, and each rank adds up its own.
- all-to-all: every rank sends its rows to all others at once, in one hop.
- broadcast: down a tree. The root sends to log2(ranks) others, which share its link; those pass it on.

Two ranks that exchange data over one connection hinder each other unless both announced beforehand that they are ready
to receive. Gloo's all-to-all and all-gather send first: the later rank's announcement waits behind its own data, and
the other rank can send only after that. So between two ranks an all-to-all takes the time of both directions, one after
the other, and an all-gather (in halves) the time of three halves. In a longer ring, a rank sends to one neighbour and
receives from the other.

The private groups of attachments and exchangers therefore come in pairs, one for each direction
(`commhooks/communicators/both_ways.py`), for exchanges that are large enough. Between two ranks these take the time of
their bytes. Among more, a late rank still sends some of its data to one rank before it announces itself to another.
"""

from __future__ import annotations

from dataclasses import dataclass

from commhooks.communicators.both_ways import goes_both_ways
from commhooks.communicators.collective import ring_bytes

MTU = 1500  # bytes of an Ethernet frame's content
_HEADERS = 20 + 20 + 12  # bytes of it that IP, TCP and TCP's timestamps take
_ETHERNET = 14  # bytes of the frame's own header, as interfaces and tc count
FRAMING = (MTU + _ETHERNET) / (MTU - _HEADERS)  # 1,514 bytes carry 1,448
ACKNOWLEDGEMENT = (_ETHERNET + _HEADERS) / (MTU - _HEADERS) / 2  # 66 bytes for every second frame, towards the sender
MESSAGE_BYTES = 390
"""Bytes of a message in addition to its data: its header and two announcements (ready to send, ready to receive), in
three frames of 48 bytes, each with 66 bytes of packet headers; and part of an acknowledgement. Measured: 380 to 413."""
_UNFAIR_SHARES = 1.5  # an all-to-all of more than two ranks over one group: measured 1.4 to 1.7 times
_AHEAD = (
    250_000  # bytes: about what a socket takes for one rank before another one's announcement; measured 130 to 310 kB
)


@dataclass(frozen=True)
class Course:
    """The cost of a collective for the rank with the busiest link.

    Bytes of data count once for each time that the link carries them or is idle because of them: a broadcast's, for
    example, for every level of its tree.
    """

    up_bytes: float
    down_bytes: float
    messages: int  # of the rank that sends most
    steps: int  # messages that wait for one another: each takes the latency
    both_ways: bool = True  # data flows in both directions, and shares the link with its acknowledgements
    has_headers: bool = True  # of packets

    @property
    def overhead(self) -> float:
        """Bytes on the link for each byte of data."""
        if not self.has_headers:
            return 1.0
        return FRAMING + ACKNOWLEDGEMENT if self.both_ways else FRAMING


NOTHING = Course(0, 0, 0, 0)


def course_of(kind: str, payload: int, ranks: int, *, is_sparse: bool = False, is_private: bool = True) -> Course:
    """Return the cost of a collective with this payload, over private groups or another one.

    `kind` must be one of the kinds in the module's docstring.
    """
    if ranks == 1:
        return NOTHING
    others = ranks - 1
    if kind == "all-reduce" and is_sparse:  # three all-gathers: of sizes, indices and values
        return _ring(others * payload, 6 * others, 3 * others)
    if kind == "all-reduce":
        return _ring(2 * others / ranks * payload, 4 * others, 2 * others)
    if kind == "reduce-scatter" and is_private:
        kind = "all-to-all"  # of rows, which every rank adds up by itself
    if kind == "reduce-scatter":
        return _ring(2 * others / ranks * payload, 4 * others * ranks, 2 * others * ranks)
    both_ways = is_private and goes_both_ways(kind, payload, ranks)
    if kind == "all-gather" and both_ways:
        return _ring(payload, 1, 1)
    if kind == "all-gather":
        return _ring(others * payload * (1.5 if ranks == 2 else 1.0), 2 * others, others)
    if kind == "all-to-all" and both_ways:
        row = payload / ranks
        return _ring(row, 1, 1) if ranks == 2 else _ring(others * row + min(row, _AHEAD), 2 * others, 1)
    if kind == "all-to-all":
        turns, hops = (2.0, 2) if ranks == 2 else (_UNFAIR_SHARES, 1)
        return _ring(others / ranks * payload * turns, others, hops)
    assert kind == "broadcast", f"no course for {kind!r}"
    depth = (ranks - 1).bit_length()
    return Course(_tree(0, ranks) * payload, depth * payload, depth, depth, both_ways=False)


def moved_bytes(kind: str, payload: int, ranks: int, *, is_sparse: bool = False) -> int:
    """Return the bytes of data sent per rank, on average over the ranks: `ring_bytes`, for a broadcast too."""
    if kind == "broadcast":  # every rank but the root receives it once
        return (ranks - 1) * payload // ranks
    return ring_bytes(kind, payload, ranks, is_sparse=is_sparse)


def _ring(data: float, messages: int, steps: int) -> Course:
    return Course(data, data, messages, steps)


def _tree(place: int, ranks: int) -> int:
    """Return the number of sends, one after another, until all below this place of the broadcast's tree have the data.

    A place's sends share its link, and so end together; then each receiver does the same.
    """
    below = [place | bit for bit in (1 << level for level in range((ranks - 1).bit_length())) if bit > place]
    below = [each for each in below if each < ranks]
    return len(below) + max((_tree(each, ranks) for each in below), default=0)
