"""Workers in one process, and gradients for them that only these tests need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from commhooks import Compressor, Exchanger
from commhooks.compressors.powersgd.matrices import form_of
from commhooks.lockstep import lockstep_connections
from commhooks.testing.workers import GivenBucket, Workers, flat, largest, mean_of, normal, take_up, zeros

__all__ = [
    "GivenBucket", "Workers", "exchangers", "flat", "gradients_of", "largest", "low_rank", "mean_of", "normal",
    "relative", "take_up", "zeros",
]  # fmt: skip


def exchangers(
    tensors: dict[str, Tensor], compressor: Compressor | str, world_size: int = 2, policy: Any = "fused"
) -> list[Exchanger]:
    """Return the exchangers of so many ranks of this process."""
    return [
        Exchanger(tensors, compressor, connection=connection) for connection in lockstep_connections(world_size, policy)
    ]


def gradients_of(
    tensors: dict[str, Tensor], seed: int, world_size: int = 2, scale: float = 1.0
) -> list[dict[str, Tensor]]:
    """Return every rank's gradient of each tensor, by name."""
    drawn = normal(list(tensors.values()), world_size, seed=seed, scale=scale)
    return [dict(zip(tensors, own, strict=True)) for own in drawn]


def low_rank(
    parameters: Sequence[Tensor], world_size: int, rank: int, seed: int, rule: str = "stacked"
) -> list[list[Tensor]]:
    """Return gradients whose mean has at most `rank`, as matrices by `rule`: all ranks share a left factor.

    In float64; parameters that are narrower hold them rounded.
    """
    generator = torch.Generator().manual_seed(seed)
    forms = [form_of(p, rule) for p in parameters]
    lead = [() if form is None or form.stack is None else (form.stack,) for form in forms]
    left = [
        torch.randn(*k, form.n if form else 1, rank, generator=generator).double()
        for k, form in zip(lead, forms, strict=True)
    ]
    gradients = []
    for _ in range(world_size):
        row = []
        for p, k, form, factor in zip(parameters, lead, forms, left, strict=True):
            memory = torch.randn(p.numel(), generator=generator).double()
            if form:
                form.view(memory).copy_(factor @ torch.randn(*k, rank, form.m, generator=generator).double() / rank)
            row.append(memory.to(p.dtype).as_strided(p.shape, p.stride()))
        gradients.append(row)
    return gradients


def relative(error: Tensor, reference: Tensor) -> float:
    """Return the largest error over the largest element."""
    if error.numel() == 0:
        return 0.0
    return largest(error) / max(largest(reference), 1e-300)
