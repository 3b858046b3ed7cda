"""The assignment of parameters to buckets: pure functions of sizes, which touch no tensor and no process group.

A *bucket* holds parameters of one dtype on one device, whose gradients are reduced by one collective (Li et al.,
PyTorch Distributed, VLDB 2020, section 3.2.3). A *plan* is a list of buckets, each a tuple of parameter indices.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import NamedTuple

MIB = 1024 * 1024
DEFAULT_CAPS = (1 * MIB, 25 * MIB)  # a small first bucket starts communicating early; only if the user gives no size

Plan = list[tuple[int, ...]]


class ParameterSpec(NamedTuple):
    """A parameter's properties that decide its bucket."""

    nbytes: int
    kind: Hashable  # only parameters of one kind (dtype and device) may share a bucket
    sparse: bool = False  # its gradient is a sparse tensor


def choose_limits(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None, one_bucket_at_first: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Turn the constructor's sizes (MiB) into limits (bytes) for the first buckets and for the rebuilt ones.

    A bucket closes at its limit; limit k is for the k-th bucket of its kind, and the last limit for all further ones.
    Lower: communication starts earlier, in more and smaller messages. ``one_bucket_at_first``: the order in which
    gradients become ready is not known yet, so limits apply only once it is. Raises ValueError for a size that is not
    positive.
    """
    for cap in [*([] if bucket_cap_mb is None else [bucket_cap_mb]), *(bucket_cap_mb_list or [])]:
        if not cap > 0:
            raise ValueError(f"bucket_cap_mb must be a positive number of MiB (got {cap!r})")
    if bucket_cap_mb_list:
        limits = tuple(_bytes(cap) for cap in bucket_cap_mb_list)
        return limits, limits
    limits = DEFAULT_CAPS if bucket_cap_mb is None else (_bytes(bucket_cap_mb),)
    return ((sys.maxsize,) if one_bucket_at_first else limits), limits


def _bytes(mib: float) -> int:
    return int(min(mib * MIB, sys.maxsize))


def assign_buckets(specs: Sequence[ParameterSpec], limits: Sequence[int], order: Sequence[int] | None = None) -> Plan:
    """Pack parameters into buckets, taking them in ``order`` (default: the given order).

    Every kind fills its own bucket, which closes once it reaches its limit. A sparse gradient has a bucket to itself.

    Returns the buckets in the order in which they closed, followed by those that never filled; without an ``order``,
    sorted by their first parameter.
    """
    plan: Plan = []
    filling: dict[Hashable, list[int]] = {}
    closed: dict[Hashable, int] = {}
    nbytes: dict[Hashable, int] = {}
    for index in range(len(specs)) if order is None else order:
        spec = specs[index]
        if spec.sparse:
            plan.append((index,))
            continue
        filling.setdefault(spec.kind, []).append(index)
        nbytes[spec.kind] = nbytes.get(spec.kind, 0) + spec.nbytes
        count = closed.get(spec.kind, 0)
        if nbytes[spec.kind] >= limits[min(count, len(limits) - 1)]:
            plan.append(tuple(filling.pop(spec.kind)))
            closed[spec.kind], nbytes[spec.kind] = count + 1, 0
    plan += [tuple(bucket) for bucket in filling.values()]
    return plan if order is not None else sorted(plan)


def plan_to_numbers(plan: Plan) -> list[int]:
    """Encode a plan as two integers for each parameter: the parameters' order, then the bucket of each."""
    order = [index for bucket in plan for index in bucket]
    return order + [position for position, bucket in enumerate(plan) for _ in bucket]


def plan_from_numbers(numbers: Sequence[int]) -> Plan:
    """Decode the result of ``plan_to_numbers``."""
    half = len(numbers) // 2
    buckets: list[list[int]] = [[] for _ in range(numbers[-1] + 1)]
    for index, position in zip(numbers[:half], numbers[half:], strict=True):
        buckets[position].append(index)
    return [tuple(bucket) for bucket in buckets]


def plan_from_names(
    buckets: Sequence[Sequence[str]], names: Sequence[str], specs: Sequence[ParameterSpec]
) -> Plan | None:
    """Turn buckets of parameter names into a plan for the parameters ``names``, or return None if they do not match.

    They match if every parameter occurs exactly once, no bucket mixes kinds, and sparse gradients are alone.
    """
    if sorted(name for bucket in buckets for name in bucket) != sorted(names):
        return None
    indices = {name: index for index, name in enumerate(names)}
    plan = [tuple(indices[name] for name in bucket) for bucket in buckets]
    return plan if all(_may_travel_together([specs[index] for index in bucket]) for bucket in plan) else None


def _may_travel_together(specs: Sequence[ParameterSpec]) -> bool:
    return len({(spec.kind, spec.sparse) for spec in specs}) == 1 and (len(specs) == 1 or not specs[0].sparse)
