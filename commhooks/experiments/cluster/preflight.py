"""A check whether this machine can have a cluster of namespaces, before anything is made."""

from __future__ import annotations

import functools
import os
import shutil
import sys

from commhooks.experiments.cluster.iproute import ClusterError, inside_new, run
from commhooks.experiments.cluster.shaping import MBIT, shaping

INSTEAD = "An emulated link (--link emulated) needs none of this."


def why_not() -> str | None:
    """Return the reason why there can be no cluster of namespaces here, and what to do; None if there can be one."""
    reason = _reason()
    return None if reason is None else f"{reason} {INSTEAD}"


def require() -> None:
    """Raise an error if there can be no cluster here.

    Raises:
        ClusterError: With the message of `why_not`.

    """
    reason = why_not()
    if reason is not None:
        raise ClusterError(reason)


def _reason() -> str | None:
    if sys.platform != "linux":
        return f"a cluster of network namespaces needs Linux (this is {sys.platform}): run it in a virtual machine."
    if os.geteuid() != 0:
        return "a cluster of network namespaces needs root: run the command with sudo."
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"a cluster of network namespaces needs the command {command}: install iproute2, or add it to PATH."
    return _refusal_of_the_kernel()


@functools.cache
def _refusal_of_the_kernel() -> str | None:
    """Try all parts of a cluster in a temporary namespace; return the reason of a refusal, or None if all work."""
    try:
        inside_new(_try)
    except OSError as error:
        return (
            f"this machine refuses network namespaces ({error.strerror}): a container needs the capability "
            "CAP_SYS_ADMIN (docker run --privileged), a kernel CONFIG_NET_NS."
        )
    except ClusterError as error:
        return f"this kernel lacks what a link needs (veth, bridge, sch_htb and sch_fifo): {error}."
    return None


def _try() -> None:
    run("ip", "-batch", "-", lines=["link add bridge type bridge", "link add eth0 type veth peer name port0"])
    run("tc", "-batch", "-", lines=shaping("eth0", 100 * MBIT, new=True))
