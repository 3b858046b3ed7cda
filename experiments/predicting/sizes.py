"""Models by their size: how gradients lie in buckets, and when each bucket is ready, without a backward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

Shape = tuple[int, ...]

MIB = 2**20
FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB  # of a DDP, unless it is given a size
FORWARD_SHARE = 1 / 3  # of compute; the backward pass costs about twice as much


def square_matrices(parameters: float, elements: float) -> list[Shape]:
    """Return the shapes of equal square matrices with about `elements` elements each, and `parameters` in all."""
    count = max(1, round(parameters / elements))
    side = max(1, round(math.sqrt(parameters / count)))
    return [(side, side)] * count


def in_buckets(shapes: Sequence[Shape], bucket_cap_mb: float | None = None) -> list[tuple[int, ...]]:
    """Return the places of the parameters in each bucket of a DDP, for fp32 gradients.

    The last parameter's gradient is taken to be ready first. A bucket closes when it has reached its limit:
    `bucket_cap_mb` MiB, or by default 1 MiB for the first one and 25 for the others.
    """
    limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES] if bucket_cap_mb is None else [bucket_cap_mb * MIB]
    buckets: list[tuple[int, ...]] = []
    filling: list[int] = []
    filled = 0
    for place in reversed(range(len(shapes))):
        filling.append(place)
        filled += 4 * math.prod(shapes[place])
        if filled >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(tuple(filling))
            filling, filled = [], 0
    return [*buckets, tuple(filling)] if filling else buckets


def ready_moments(elements: Sequence[int], compute: float) -> list[float]:
    """Return the seconds of compute after which buckets with these numbers of elements are ready, one after another.

    The backward pass is two thirds of the compute, and each bucket takes its share of it by elements.
    """
    forward = FORWARD_SHARE * compute
    done = accumulate(elements)
    return [min(compute, forward + part / sum(elements) * (compute - forward)) for part in done]
