"""A policy for Gloo's event loop: when it wakes up, it must not interrupt a thread that holds the lock it needs.

Each Gloo connection has a lock. A thread that sends holds it while data arrives, for which Gloo's event loop wakes up.
If both are on one core, the kernel often lets the loop interrupt the sender. The loop finds the connection locked, and
asks for the same events again and again until the kernel's next tick interrupts it, up to 4 milliseconds later with 250
ticks a second; meanwhile nobody sends. A thread of the policy SCHED_BATCH interrupts none of the usual policy, and gets
the same share of the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def unhurried() -> Iterator[None]:
    """Start threads inside this context with SCHED_BATCH: a thread inherits the policy of its creator.

    It does nothing if there is no such policy, if setting it is forbidden, or if the user has chosen another policy.
    """
    has_changed = _become_unhurried()
    try:
        yield
    finally:
        if has_changed:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _become_unhurried() -> bool:
    """Give the calling thread (0) the policy if it has the usual one; return whether that succeeded."""
    if not hasattr(os, "SCHED_BATCH"):
        return False
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return False
    return True
