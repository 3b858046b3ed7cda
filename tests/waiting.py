"""Waiting for what another thread or process does, for as long as a busy machine may need."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Wait until a condition holds; return whether it does, at the latest after `seconds`, which only a fault takes."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return holds


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if nobody has asked for its exit code yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
