"""The counters of a network interface: the bytes that really left this machine, to compare with a run's own counts."""

from __future__ import annotations

import os
from pathlib import Path

# Of this thread: a thread may be in a network namespace of its own, and /sys shows the one in which it was mounted.
_COUNTERS = Path("/proc/thread-self/net/dev")
_SENT_COLUMN = 8  # after eight columns of what was received


def interface_bytes(interface: str) -> tuple[int, int]:
    """Return the bytes that an interface of this thread's network namespace has sent and received since it exists.

    They include the headers of Ethernet, IP and TCP, and acknowledgements. On a virtual interface, and on a card that
    divides large packets by itself, the headers of up to 64 kB count once; on the wire every 1,448 bytes have some.

    Raises:
        ValueError: There is no such interface.

    """
    names = []
    for line in _COUNTERS.read_text().splitlines()[2:]:
        name, _, counters = line.partition(":")
        names.append(name.strip())
        if names[-1] == interface:
            columns = counters.split()
            return int(columns[_SENT_COLUMN]), int(columns[0])
    raise ValueError(f"there is no interface {interface!r} here; expected one of {', '.join(names)}")


def gloo_interface() -> str | None:
    """Return the interface that GLOO_SOCKET_IFNAME tells Gloo to use; None if it names none."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0] or None
