"""The only file that knows devices: work that is queued, streams, and host memory that they access later.

Support for another accelerator would be a change here. Only CUDA is tested.

A GPU runs what the host queues on its streams, one after another on each stream; the host neither knows the values nor
needs to wait for them. Residuals in the host's memory (`residuals="host"`) are written by copies that run when a stream
reaches them. Before the host accesses such memory, it must wait for the last of them; otherwise it could read too
early, or be overwritten. No wait is needed on the device, where the stream's order is enough.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

ACCELERATOR = torch.device("cuda")
"""The only supported kind of device besides the CPU."""
_BACKENDS_ON_STREAMS = ("nccl",)
_EVENTS_TO_KEEP = 4096
"""Above this many entries, completed ones are removed: freed memory leaves some behind."""


class Mark(Protocol):
    """A position in a stream's queue: a CUDA event."""

    def query(self) -> bool:
        """Return whether the device has reached the mark."""
        ...

    def wait(self) -> None:
        """Make the current stream wait until the device has reached the mark."""
        ...

    def synchronize(self) -> None:
        """Make the host wait until the device has reached the mark."""
        ...


# --- questions --------------------------------------------------------------------------------------------------------


def runs_later(tensor: Tensor) -> bool:
    """Return whether work on a tensor is queued, so that the host would have to wait for its values."""
    return tensor.is_cuda


def runs_on_streams(backend: str) -> bool:
    """Return whether streams, not the host, wait for the collectives of a torch.distributed backend.

    Such a backend runs collectives in the order in which they are issued, and needs no thread.
    """
    return backend in _BACKENDS_ON_STREAMS


def device_in_use() -> torch.device | None:
    """Return this process's current accelerator, or None if it has not used one yet."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.device(ACCELERATOR.type, torch.cuda.current_device())


def model_of(device: torch.device) -> str:
    """Return the name of an accelerator's model, as its maker calls it, or its kind if PyTorch knows no model."""
    name_of = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if name_of is None else str(name_of(device))


def matmul_settings(like: Tensor) -> Any:
    """Return PyTorch's settings for products of matrices on a tensor's device, or None if it has none."""
    return torch.backends.cuda.matmul if runs_later(like) else getattr(torch.backends.mkldnn, "matmul", None)


# --- streams ----------------------------------------------------------------------------------------------------------


class SideStream:
    """A stream on which compressors compute and wait for collectives."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which work is queued on this stream."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """Return a mark behind everything queued so far."""
        mark: Mark = self._stream.record_event()
        return mark

    def join(self, other: SideStream) -> None:
        """Make later work on this stream wait for everything queued so far on another one."""
        self._stream.wait_stream(other._stream)

    def let_caller_follow(self) -> None:
        """Make later work on the device's current stream wait for everything queued so far on this one."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def mark_of(device: torch.device) -> Mark | None:
    """Return a mark behind everything queued so far on a device's current stream; None for the CPU."""
    if device.type != ACCELERATOR.type:
        return None
    mark: Mark = torch.cuda.current_stream(device).record_event()
    return mark


def use_own_stream(device: torch.device) -> None:
    """Give the calling thread its own stream on the device, unless it has one."""
    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


def future_on(device: torch.device) -> torch.futures.Future[Tensor]:
    """Return a future for a tensor on a device; waiting for it blocks the current stream, not the host."""
    return torch.futures.Future(devices=[device] if device.type == ACCELERATOR.type else None)


def wait_for_device(device: torch.device) -> None:
    """Make the host wait for everything queued on a device, by default the current one; do nothing for the CPU."""
    if device.type == ACCELERATOR.type:
        torch.cuda.synchronize(device)


# --- random numbers ---------------------------------------------------------------------------------------------------


def generator_states() -> dict[str, Tensor]:
    """Return the state of the accelerator's random number generator, by the device's type; empty if it is not used."""
    return {ACCELERATOR.type: torch.cuda.get_rng_state()} if device_in_use() is not None else {}


def set_generator_states(states: Mapping[str, Tensor]) -> None:
    """Restore the result of `generator_states`, if such a device is available."""
    if ACCELERATOR.type in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[ACCELERATOR.type])


# --- memory that a stream accesses later ------------------------------------------------------------------------------


_last: dict[int, Mark] = {}
"""The mark behind the last copy into each storage in the host's memory."""
_lock = threading.Lock()


def copied_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a CPU tensor on another device, or itself on the CPU; the host does not wait for the copy."""
    if device.type != ACCELERATOR.type:
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


def copied_to_host(tensor: Tensor) -> tuple[Tensor, Mark | None]:
    """Return a tensor's values on the CPU, and the mark after which they are there; itself and None on the CPU."""
    if not runs_later(tensor):
        return tensor, None
    pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return pinned, _queue(pinned, tensor)


def queue_copy(kept: Tensor, value: Tensor) -> None:
    """Copy a GPU's tensor into memory that may be the host's, when the current stream reaches this point."""
    if kept.device == value.device and runs_later(kept):
        kept.copy_(value)
        return
    mark = _queue(kept, value)
    with _lock:
        _last[place_of(kept)] = mark
        if len(_last) > _EVENTS_TO_KEEP:
            for place in [place for place, mark in _last.items() if mark.query()]:
                del _last[place]


def wait_for_copies(tensors: Iterable[Tensor]) -> None:
    """Wait until every copy queued into these tensors is done, including earlier work on the same stream."""
    with _lock:
        marks = [
            _last[place] for place in {place_of(kept) for kept in tensors if not runs_later(kept)} if place in _last
        ]
    for mark in marks:
        mark.synchronize()


def keep_until_read(tensors: Iterable[Tensor]) -> None:
    """Keep these tensors' memory from being reused before the current stream has finished its work so far.

    Needed before dropping the last reference to a tensor that was allocated on another stream, such as loaded state.
    """
    for tensor in tensors:
        if runs_later(tensor):
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _queue(kept: Tensor, value: Tensor) -> Mark:
    kept.copy_(value, non_blocking=True)
    mark = mark_of(value.device)
    assert mark is not None, "a copy to the host comes from a device that has streams"
    return mark


def place_of(kept: Tensor) -> int:
    """Return the key of a tensor's storage: parts of a storage are written separately and read as a whole."""
    return kept.untyped_storage().data_ptr()
