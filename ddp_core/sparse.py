"""The group for sums of sparse gradients, which runs one collective at a time.

Gloo's sum of sparse tensors corrupts the heap if another collective of its process group ends at the same moment: the
group's two threads write the name of the finished collective into one string, without a lock, and this is the only name
too long for the string's inline buffer (PyTorch 2.13; docs/guide/ddp_core.md).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from ddp_core.collectives import store_of

_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()


def group_for_sparse_sums(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return a Gloo group with one thread over the ranks of ``group``, always the same one.

    Every rank must call it; the first call blocks until all have. Returns ``group`` itself if another backend reduces
    tensors on ``device``, or if it is written in Python, has one thread already, or has no store in which ranks could
    meet.
    """
    if group in _opened:
        return _opened[group]
    store = store_of(group) if type(group) is dist.ProcessGroup else None
    if store is None:
        return group
    backend: Any = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    if not isinstance(backend, ProcessGroupGloo):
        return group
    settings: Any = backend.options
    if settings._threads == 1:
        return group
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
    options._devices, options._timeout, options._threads = settings._devices, settings._timeout, 1
    _opened[group] = ProcessGroupGloo(PrefixStore("ddp_core/sparse", store), group.rank(), group.size(), options)
    return _opened[group]
