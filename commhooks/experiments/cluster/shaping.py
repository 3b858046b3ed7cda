"""The rate of a link, set and read by `tc`.

HTB with one class, rather than TBF. A token bucket must be at least as large as a packet, and the kernel hands packets
of up to 64 kB to a virtual interface, to be divided late (GSO): 52 ms of a link at 10 Mbit/s would pass at once. HTB
lets a packet through when there is any credit, and waits until it is paid for, so that the bucket may be small; and a
slower rate can be set while large packets wait in the queue, for which a TBF's new bucket would be too small for ever.

The kernel charges a large packet with the headers of all frames into which it would be divided. The rate is therefore a
wire's, of which TCP's data gets 1,448 / 1,514.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from commhooks.experiments.cluster.iproute import run
from commhooks.experiments.links.link import LinkSettings, format_rate, parse_rate

MBIT = 1e6
SLOWEST, FASTEST = 0.1 * MBIT, 1e12  # the fastest is far above what any machine can move: it stands for no limit
BURST_SECONDS = 0.25e-3
"""The bucket, in seconds of the rate. Larger: more bytes pass at once after a pause. Smaller: a timer that fires late
costs rate that is never made up for; at 0.05 ms 10 Gbit/s lost 6 %, and a busy machine's timers are worse."""
QUEUE_SECONDS = (
    0.05  # of data that waits for the link: lower, and many senders to one lose packets; higher, and they wait long
)
_SMALLEST_BURST = 2 * 1514  # bytes: two frames
_SMALLEST_QUEUE = 150_000  # bytes: the first packets of ten connections
_CLASS = re.compile(r"class htb 1:1 .*\brate (?P<rate>\S+)bit .*\n\s*Sent (?P<bytes>\d+) bytes")


def largest_packet(rate: float | None) -> int:
    """Return the size to which packets are limited before they are divided.

    A packet arrives when its transmission begins, not when it would end, so small ones are more faithful. Fast links
    need large ones: with 16 kB this machine's processors could not fill 10 Gbit/s.
    """
    return 16_384 if rate is not None and rate <= 2_000 * MBIT else 65_536


def check_rate(rate: float | None) -> None:
    """Raise an error if no link can have this rate.

    Raises:
        ValueError: The rate is too low or too high.

    """
    if rate is not None and not SLOWEST <= rate < FASTEST:
        raise ValueError(
            f"a link's rate must be at least 0.1 Mbit/s and below 1 Tbit/s, or unlimited (got {format_rate(rate)})"
        )


def check_rates(link: LinkSettings) -> None:
    """Raise an error if hosts cannot have one of the link's rates, at first or later.

    Raises:
        ValueError: A rate is too low or too high.

    """
    for rate in (link.bits_per_second, link.down_bits_per_second, *(rate for _, rate in link.schedule)):
        check_rate(rate)


def shaping(device: str, rate: float | None, *, new: bool) -> list[str]:
    """Return the lines for `tc -batch` that set the rate at which a device sends, in bits per second; None: no limit.

    Args:
        device: The name of an interface.
        rate: From SLOWEST to FASTEST.
        new: True if the device has had no rate so far. Otherwise the rate is changed in place, and packets that wait
            are kept.

    """
    bits = FASTEST if rate is None else rate
    burst = max(_SMALLEST_BURST, round(bits / 8 * BURST_SECONDS))
    queue = max(_SMALLEST_QUEUE, round(min(bits, 100_000 * MBIT) / 8 * QUEUE_SECONDS))
    verb = "add" if new else "change"
    lines = [
        f"class {verb} dev {device} parent 1: classid 1:1 htb rate {bits:.0f}bit burst {burst} cburst {burst} "
        "quantum 60000",  # matters between classes only; without it the kernel warns at high rates
        f"qdisc {verb} dev {device} parent 1:1 handle 10: bfifo limit {queue}",
    ]
    return [f"qdisc add dev {device} root handle 1: htb default 1", *lines] if new else lines


def shaped(namespace: str, devices: Sequence[str]) -> list[tuple[float | None, int]]:
    """Return each device's rate (None: no limit) and the bytes it has sent, with the headers of every frame."""
    text = run("tc", "-s", "-n", namespace, "-batch", "-", lines=[f"class show dev {device}" for device in devices])
    found = [(parse_rate(f"{one['rate']}bit/s"), int(one["bytes"])) for one in _CLASS.finditer(text)]
    assert len(found) == len(devices), f"tc said:\n{text}"
    return [(None if rate is not None and rate >= FASTEST else rate, sent) for rate, sent in found]
