"""The choices that a user makes at construction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddp_core.buckets import Limits


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of ``DistributedDataParallel`` that are read later."""

    limits: Limits
    bucket_bytes_cap_list: list[int]
    device_ids: list[torch.device] | None
    output_device: torch.device | None
    dim: int
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    skip_all_reduce_unused_params: bool
    lazy_bucket_allocation: bool

    @property
    def bucket_bytes_cap(self) -> int:
        """The largest limit of a bucket."""
        return max(self.limits.rebuilt)
