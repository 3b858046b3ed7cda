"""Decide which parameter travels in which bucket.

Pure functions over sizes: no tensor is touched and no process group is needed, so the rules can be tested alone.
A *bucket* is a run of parameters of one dtype on one device whose gradients are reduced by one collective
(PyTorch DDP, VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MIB = 1024 * 1024
DEFAULT_CAP_MIB = 25
DEFAULT_FIRST_CAP_BYTES = MIB  # a small first bucket starts communicating early; only if the user names no size


@dataclass(frozen=True)
class ParameterSpec:
    """What bucketing needs to know of a parameter: its bytes, what it may share a bucket with, and if it is sparse."""

    nbytes: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @classmethod
    def of(cls, parameter: torch.Tensor, sparse: bool = False) -> ParameterSpec:
        """Describe ``parameter``; ``sparse`` says that its gradient will be a sparse tensor."""
        return cls(parameter.numel() * parameter.element_size(), parameter.dtype, parameter.device, sparse)


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: the positions of its parameters, in the order of its memory, and the limit that closed it."""

    indices: tuple[int, ...]
    limit_bytes: int


@dataclass(frozen=True)
class BucketLimits:
    """The size at which a bucket closes, in bytes; a list gives each bucket its own, the last one repeating.

    Lower: communication starts earlier, in more and smaller messages.
    """

    initial: tuple[int, ...]
    rebuilt: tuple[int, ...]

    @classmethod
    def choose(
        cls,
        bucket_cap_mb: float | None,
        bucket_cap_mb_list: Sequence[float] | None,
        one_bucket_at_first: bool,
    ) -> BucketLimits:
        """Turn the constructor's arguments (MiB) into limits (bytes).

        ``one_bucket_at_first``: the order in which gradients become ready is not yet known, so the first iteration
        uses one bucket per dtype and device, and the limits apply when buckets are rebuilt in the observed order.

        Raises ValueError for a size that is not a positive number.
        """
        for cap in (
            (bucket_cap_mb_list or []) if bucket_cap_mb is None else [bucket_cap_mb, *(bucket_cap_mb_list or [])]
        ):
            if not cap > 0:
                raise ValueError(f"bucket_cap_mb must be a positive number of MiB (got {cap!r})")
        if bucket_cap_mb_list:
            limits = tuple(int(cap * MIB) for cap in bucket_cap_mb_list)
            return cls(initial=limits, rebuilt=limits)
        if bucket_cap_mb is None:
            limits = (DEFAULT_FIRST_CAP_BYTES, DEFAULT_CAP_MIB * MIB)
        else:
            limits = (int(bucket_cap_mb * MIB),)
        return cls(initial=(sys.maxsize,) if one_bucket_at_first else limits, rebuilt=limits)


def assign_buckets(
    specs: Sequence[ParameterSpec], limits: Sequence[int], order: Sequence[int] | None = None
) -> list[BucketPlan]:
    """Pack parameters into buckets.

    Parameters are taken in ``order`` (default: as they stand). Each dtype and device fills a bucket of its own, which
    closes once it holds ``limits[k]`` bytes or more, k counting the buckets closed for that dtype and device and
    stopping at the last limit. A sparse gradient is alone in its bucket.

    Returns the buckets in the order in which they closed, those never filled last; without an ``order``, sorted by
    their first parameter.
    """
    closed: list[BucketPlan] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    nbytes: dict[tuple[torch.dtype, torch.device], int] = {}
    count: dict[tuple[torch.dtype, torch.device], int] = {}
    for index in range(len(specs)) if order is None else order:
        spec = specs[index]
        if spec.sparse:
            closed.append(BucketPlan((index,), sys.maxsize))
            continue
        key = (spec.dtype, spec.device)
        filling.setdefault(key, []).append(index)
        nbytes[key] = nbytes.get(key, 0) + spec.nbytes
        limit = limits[min(count.get(key, 0), len(limits) - 1)]
        if nbytes[key] >= limit:
            closed.append(BucketPlan(tuple(filling.pop(key)), limit))
            nbytes[key] = 0
            count[key] = count.get(key, 0) + 1
    for key, indices in filling.items():
        closed.append(BucketPlan(tuple(indices), limits[min(count.get(key, 0), len(limits) - 1)]))
    return closed if order is not None else sorted(closed, key=lambda plan: plan.indices[0])


def plan_to_numbers(plans: Sequence[BucketPlan], parameters: int) -> list[int]:
    """Write a plan over ``parameters`` parameters as 3·parameters + 1 integers, a length every rank knows."""
    lengths = [len(plan.indices) for plan in plans]
    limits = [plan.limit_bytes for plan in plans]
    padding = [0] * (parameters - len(plans))
    order = [index for plan in plans for index in plan.indices]
    return [len(plans), *lengths, *padding, *limits, *padding, *order]


def plan_from_numbers(numbers: Sequence[int]) -> list[BucketPlan]:
    """Read what :func:`plan_to_numbers` wrote."""
    buckets, parameters = numbers[0], (len(numbers) - 1) // 3
    lengths = numbers[1 : 1 + buckets]
    limits = numbers[1 + parameters : 1 + parameters + buckets]
    order = iter(numbers[1 + 2 * parameters :])
    return [
        BucketPlan(tuple(next(order) for _ in range(length)), limit)
        for length, limit in zip(lengths, limits, strict=True)
    ]
