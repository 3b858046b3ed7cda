"""The functions of `torch.cuda` that a PyTorch without CUDA lacks, on the virtual device."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.virtual_device.device import extension

CYCLES_PER_SECOND = 1.5e9
"""Of `torch.cuda._sleep`."""

_DEBUG_MODES = {"default": 0, "warn": 1, "error": 2}


POOL = 32
"""The streams of a device beside its default one, as many as CUDA's PyTorch has of a priority."""
_pools: dict[int, list[torch.Stream]] = {}
_taken: Counter[int] = Counter()


class Stream(torch.Stream):
    """A stream of a device, from a pool: after `POOL` others it is the first one again."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        index = _index(device)
        pool, position = _pools.setdefault(index, []), _taken[index] % POOL
        _taken[index] += 1
        if position == len(pool):
            pool.append(super().__new__(cls, device=torch.device("cuda", index)))
        return pool[position]


def begin_pools_again() -> None:
    """Let the next stream be the first of its pool, which the next run may then share with former ones."""
    _taken.clear()


class Event(torch.Event):
    """An event of the current device. Its times are those at which the host ran the kernels."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        # Not of the class: `elapsed_time` takes no instance of another one.
        return torch.Event(torch.device("cuda", extension().current_device()), enable_timing=enable_timing)


class StreamContext:
    """Queue on a stream, within a `with`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        if self.stream is not None:
            self._device = extension().current_device()
            self._stream = extension().current_stream(self.stream.device_index)
            set_stream(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            extension().set_stream(self.stream.device_index, self._stream)
            extension().set_device(self._device)


@contextlib.contextmanager
def _on_device(device: Any) -> Iterator[None]:
    before = extension().current_device()
    extension().set_device(_index(device))
    try:
        yield
    finally:
        extension().set_device(before)


def current_stream(device: Any = None) -> torch.Stream:
    """Return the stream on which this thread queues."""
    index = _index(device)
    return _stream(index, extension().current_stream(index))


def set_stream(stream: torch.Stream) -> None:
    """Let this thread queue on a stream, and on its device."""
    extension().set_device(stream.device_index)
    extension().set_stream(stream.device_index, stream.stream_id)


def set_sync_debug_mode(mode: Any) -> None:
    """Let operators for which the host waits warn, or raise."""
    extension().set_sync_debug_mode(_DEBUG_MODES.get(mode, mode))


def replace() -> None:
    """Put the virtual device's functions in the place of torch.cuda's."""
    device = extension()
    everyone = range(device.device_count())
    for name, function in {
        # what there is
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": device.device_count,
        "get_device_name": lambda device=None: "virtual device",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="virtual device", major=9, minor=0, total_memory=2**34, multi_processor_count=1
        ),
        "is_bf16_supported": lambda including_emulation=True: True,
        # the current device and stream
        "current_device": device.current_device,
        "set_device": lambda device: extension().set_device(_index(device)),
        "device": _on_device,
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": lambda device=None: _stream(_index(device), 0),
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "set_stream": set_stream,
        # waiting
        "synchronize": lambda device=None: extension().synchronize(_index(device)),
        "_sleep": lambda cycles: device.sleep(cycles / CYCLES_PER_SECOND),
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": device.get_sync_debug_mode,
        # random numbers
        "get_rng_state": lambda device=None: extension().get_rng_state(_index(device)),
        "set_rng_state": lambda state, device=None: extension().set_rng_state(_index(device), state),
        "get_rng_state_all": lambda: [device.get_rng_state(each) for each in everyone],
        "manual_seed": lambda seed: device.manual_seed(device.current_device(), seed),
        "manual_seed_all": lambda seed: [device.manual_seed(each, seed) for each in everyone],
        # memory
        "memory_allocated": lambda device=None: extension().memory(_index(device))[0],
        "max_memory_allocated": lambda device=None: extension().memory(_index(device))[1],
        "reset_peak_memory_stats": lambda device=None: extension().reset_peak_memory(_index(device)),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }.items():
        setattr(torch.cuda, name, function)
    modules: Any = torch.cuda
    modules.streams.Stream, modules.streams.Event = Stream, Event
    modules.random.get_rng_state = torch.cuda.get_rng_state
    modules.random.set_rng_state = torch.cuda.set_rng_state
    storage: Any = torch.UntypedStorage
    storage.resize_ = _resize_storage


_resize_on_cpu: Any = torch.UntypedStorage.resize_


def _resize_storage(storage: torch.UntypedStorage, size: int) -> Any:
    """Give a storage other memory, as FSDP2 does between two passes."""
    if storage.device.type != "cuda":
        return _resize_on_cpu(storage, size)
    extension().resize_storage(storage, size)
    return storage


def _stream(device: int, stream: int) -> torch.Stream:
    return torch.Stream(stream_id=stream, device_index=device, device_type=1)


def _index(device: Any) -> int:
    if device is None:
        return int(extension().current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(extension().current_device()) if index is None else index
