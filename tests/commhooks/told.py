"""What an attempt that should raise has told."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Told:
    """What became of one attempt on one rank."""

    error: str
    text: str
    seconds: float


def told_by(attempt: Callable[[], Any]) -> Told:
    """Make an attempt that should raise."""
    begun = time.monotonic()
    try:
        attempt()
    except Exception as error:
        return Told(type(error).__name__, str(error), time.monotonic() - begun)
    return Told("nothing", "", time.monotonic() - begun)
