"""Host memory that a CUDA stream accesses later than the host queues the work.

Residuals in the host's memory (`residuals="host"`) are written by copies that run when a stream reaches them. Before
the host accesses such memory, it must wait for the last of them; otherwise it could read too early, or be overwritten.
No wait is needed on the device, where the stream's order is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

_EVENTS_TO_KEEP = 4096
"""Above this many entries, completed ones are removed: freed memory leaves some behind."""


class _Event(Protocol):
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


_last: dict[int, _Event] = {}
"""For each storage in the host's memory, the event that completes when the last copy into it is done."""
_lock = threading.Lock()


def queue_copy(kept: Tensor, value: Tensor) -> None:
    """Copy a GPU's tensor into memory that may be the host's, when the current stream reaches this point."""
    if kept.device == value.device and kept.is_cuda:
        kept.copy_(value)
        return
    event = _queue(kept, value)
    with _lock:
        _last[_place(kept)] = event
        if len(_last) > _EVENTS_TO_KEEP:
            for place in [place for place, event in _last.items() if event.query()]:
                del _last[place]


def wait_for_copies(tensors: Iterable[Tensor]) -> None:
    """Wait until every copy queued into these tensors is done, including earlier work on the same stream."""
    with _lock:
        events = [_last[place] for place in {_place(kept) for kept in tensors if not kept.is_cuda} if place in _last]
    for event in events:
        event.synchronize()


def keep_until_read(tensors: Iterable[Tensor]) -> None:
    """Keep these tensors' memory from being reused before the current stream has finished its work so far.

    Needed before dropping the last reference to a tensor that was allocated on another stream, such as loaded state.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _queue(kept: Tensor, value: Tensor) -> _Event:
    kept.copy_(value, non_blocking=True)
    event: _Event = torch.cuda.current_stream(value.device).record_event()
    return event


def _place(kept: Tensor) -> int:
    """Return the key of a tensor's storage: parts of a storage are written separately and read as a whole."""
    return kept.untyped_storage().data_ptr()
