"""Memory on which a CUDA stream works later than the host queues the work.

Residuals in the host's memory (`residuals="host"`) are written by copies that a stream carries out when it comes to
them. Whoever touches such memory on the host waits for the last one first: it would be overwritten otherwise, or read
too early. On the device nobody needs to: there the stream's order is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

_EVENTS_TO_KEEP = 4096
"""More are looked through for those that have passed: memory that is gone leaves some behind."""


class _Event(Protocol):
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


_last: dict[int, _Event] = {}
"""For each storage in the host's memory, what passes when the last copy into it is done."""
_lock = threading.Lock()


def queue_copy(kept: Tensor, value: Tensor) -> None:
    """Copy a GPU's tensor into memory that may be the host's, when the current stream comes to it."""
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
    """Wait until every copy that was queued into these tensors is done, those before them on the stream included."""
    with _lock:
        events = [_last[place] for place in {_place(kept) for kept in tensors if not kept.is_cuda} if place in _last]
    for event in events:
        event.synchronize()


def keep_until_read(tensors: Iterable[Tensor]) -> None:
    """Let nobody reuse these tensors' memory before the current stream has done what it was given so far.

    Needed before the last reference to a tensor goes that was allocated on another stream, as what is loaded is.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _queue(kept: Tensor, value: Tensor) -> _Event:
    kept.copy_(value, non_blocking=True)
    event: _Event = torch.cuda.current_stream(value.device).record_event()
    return event


def _place(kept: Tensor) -> int:
    """Return what tells storages apart: parts of one are written by turns, and read as a whole."""
    return kept.untyped_storage().data_ptr()
