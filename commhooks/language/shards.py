"""Flags for buckets of shards, by which ranks whose answers differ still reach one verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from commhooks.language.requests import Part
from commhooks.tensors import all_finite


@dataclasses.dataclass(frozen=True, eq=False)
class Flags(Part):
    """A part of an all-to-all, [world size, 1], that tells every rank whether this one is sending inf or NaN.

    The answer is the same on every rank, 0 for each rank or NaN: pass it to `Judge`.
    """

    @classmethod
    def of(cls, sent: Iterable[Tensor], world_size: int) -> Flags:
        """Return the flags of a rank that sends these tensors, or codes of them."""
        return cls(torch.where(all_finite(sent), 0.0, torch.nan).expand(world_size, 1))
