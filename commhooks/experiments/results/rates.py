"""The rate at which a run sends, and the fraction of its link that it uses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.runs import StepRecord


def bytes_per_second(steps: Sequence[StepRecord]) -> float:
    """Return the bytes that a rank moved in these steps, over their time; evaluation is not part of it."""
    seconds = sum(step.seconds for step in steps)
    return sum(step.moved_bytes for step in steps) / seconds if seconds else math.nan


def link_use(steps: Sequence[StepRecord], link: LinkSettings) -> float | None:
    """Return the fraction of the link's capacity that was used in these steps; None for a link without a rate.

    Counted are the bytes that the network interface sent, or those moved by a rank if the interface is not counted. The
    capacity is that of the link at its slowest.
    """
    rate, seconds = link.slowest, sum(step.seconds for step in steps)
    if rate is None or not seconds:
        return None
    sent = (step.moved_bytes if step.interface_bytes is None else step.interface_bytes for step in steps)
    return 8 * sum(sent) / (seconds * rate)
