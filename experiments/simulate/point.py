"""One prediction: a hook on a number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ..predicting.link import Link
from ..predicting.step_time import StepTime


@dataclass(frozen=True)
class Point:
    """One simulated cluster."""

    hook: str
    ranks: int
    link: Link
    time: StepTime
