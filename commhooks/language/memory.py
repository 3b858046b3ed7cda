"""Reading and writing state, regardless of where and how it is stored."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.devices import queue_copy, runs_later

_IN_CACHE = 1 << 16


def commit(memory: Tensor, value: Tensor, allowed: Tensor) -> None:
    """Write `value` into `memory` where `allowed` (a broadcastable bool) is true; dtype and device may differ."""
    if memory is value:
        return
    if allowed.numel() == 1 and not runs_later(allowed):
        if allowed:
            memory.copy_(value)
    elif memory.device == value.device:
        torch.where(allowed, value.to(memory.dtype), memory, out=memory)  # out takes no other dtype
    else:
        queue_copy(memory, torch.where(allowed, value, memory.to(value.device, non_blocking=True)))


def commit_all(memories: Sequence[Tensor], values: Tensor, allowed: Tensor) -> None:
    """Write row i of `values` into memory i where `allowed` is true: as `commit`, but in few calls.

    `allowed` is a 0-dim bool, or on a GPU one for each memory. All memory is on one device; dtypes may differ.
    """
    if runs_later(allowed):
        allowed = allowed.view(-1, *[1] * (values.dim() - 1))
        values = torch.where(allowed, values, torch.stack(list(memories)).to(values.dtype))
    elif not allowed:
        return
    torch._foreach_copy_(list(memories), list(values.unbind()))


def add_residuals(memories: Sequence[Tensor], residuals: Sequence[Tensor], decay: float = 1.0) -> None:
    """Add residuals, in any storage, to memory of the computing dtype."""
    if residuals[0].device != memories[0].device:
        pairs = zip(residuals, memories, strict=True)
        residuals = [kept.to(memory.device, non_blocking=True) for kept, memory in pairs]
    if len(memories) == 1:  # usually
        memories[0].add_(residuals[0], alpha=decay)
    else:
        torch._foreach_add_(list(memories), list(residuals), alpha=decay)


def surely(mask: Tensor) -> bool:
    """Return whether a mask is known, without waiting, to be true everywhere.

    It is always False on a GPU, where reading would mean waiting, and for meta tensors.
    """
    return not (runs_later(mask) or mask.is_meta) and bool(mask if mask.dim() == 0 else mask.all())


def elements_at_once(device: torch.device) -> int:
    """Return the number of elements to compute with at a time: in fp32 they fit in a core's cache; on a GPU, all."""
    return _IN_CACHE if device.type == "cpu" else sys.maxsize
