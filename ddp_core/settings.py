"""A reducer's settings: the user's choices at construction, in the reducer's own units."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReducerSettings:
    """A reducer's settings; see the arguments of ``DistributedDataParallel``. Limits are in bytes."""

    limits: tuple[int, ...]
    rebuilt_limits: tuple[int, ...]
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    skip_all_reduce_unused_params: bool
    lazy_bucket_allocation: bool = False
