"""Hosts on this machine: network namespaces on a bridge, which is in a namespace of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000
INTERFACE = "eth0"


def why_not() -> str | None:
    """Return why there can be no namespaces here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None if shutil.which("ip") else "network namespaces need the command ip (iproute2)"


@contextlib.contextmanager
def hosts(number: int) -> Iterator[list[str]]:
    """Make hosts that reach each other, and yield their namespaces; remove them at the end."""
    switch = f"commhooks-{os.getpid()}-switch"
    names = [f"commhooks-{os.getpid()}-{host}" for host in range(number)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            port = f"port{host}"
            _ip("-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        yield names
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False)


def address(host: int) -> str:
    """Return a host's address, which only the hosts beside it can reach."""
    return f"10.77.0.{host + 1}"


def move_to(namespace: str) -> None:
    """Move this thread, and all that it starts from now on, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace} failed")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def set_cable(namespace: str, *, plugged_in: bool) -> None:
    """Plug a host's cable in, or pull it."""
    _ip("-n", namespace, "link", "set", INTERFACE, "up" if plugged_in else "down")
