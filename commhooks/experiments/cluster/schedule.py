"""Rates that change during a run."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch.distributed as dist

from commhooks.experiments.cluster.namespaces import Cluster
from commhooks.experiments.cluster.shaping import check_rate

Schedule = Sequence[tuple[float, float | None]]
"""Seconds after the start, ascending, and the rate from then on in bits per second (None: no limit)."""


def set_rate(cluster: Cluster | None, rank: int, rate: float | None) -> None:
    """Set the rate of all links, if they are real (an emulated one has its rate already); every rank calls this."""
    if cluster is not None and rank == 0:
        cluster.set_rate(rate)
    dist.barrier()


@contextmanager
def follow(cluster: Cluster, schedule: Schedule, *, start: float | None = None) -> Iterator[None]:
    """Set the rate of all links, in both directions, at the given times while the block runs.

    Args:
        cluster: The cluster whose links change.
        schedule: The times and the new rates.
        start: The time that counts as zero, by `time.monotonic()`; None: now.

    Raises:
        ValueError: The schedule is not in ascending order, or has a rate that is not possible.
        ClusterError: A rate could not be set; raised when the block ends.

    """
    seconds = [at for at, _ in schedule]
    if seconds != sorted(seconds) or not all(0 <= at < math.inf for at in seconds):
        raise ValueError(f"a schedule's times must be at least zero and ascend (got {', '.join(map(str, seconds))})")
    for _, rate in schedule:
        check_rate(rate)
    begun = time.monotonic() if start is None else start
    ended = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        applied = thread.submit(_apply, cluster, schedule, begun, ended)
        try:
            yield
        finally:
            ended.set()
    applied.result()


def _apply(cluster: Cluster, schedule: Schedule, start: float, ended: threading.Event) -> None:
    for seconds, rate in schedule:
        if ended.wait(max(0.0, start + seconds - time.monotonic())):
            return
        cluster.set_rate(rate)
