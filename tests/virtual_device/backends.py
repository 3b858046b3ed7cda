"""The backends `nccl` and `gloo` for the virtual device's tensors, across processes, and ranks in lockstep.

Across processes each group moves its bytes over a Gloo group of its own. `nccl` waits on streams, `gloo` blocks the
host in `wait`, as PyTorch's do.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed import distributed_c10d

from tests.virtual_device.device import extension
from tests.virtual_device.torch_cuda import current_stream

_METHODS = ("allreduce", "allgather", "_allgather_base", "alltoall_base", "reduce_scatter", "broadcast")
_TIMEOUT = timedelta(minutes=30)


class Options:
    """What `torch.distributed` tells NCCL."""

    is_high_priority_stream = False
    _timeout = _TIMEOUT


def _nccl(store: Store, rank: int, size: int, options: Options) -> Any:
    gloo = ProcessGroupGloo(PrefixStore("virtual", store), rank, size, options._timeout)
    return extension().Group(gloo, "nccl")


class _Callable(type):
    """`ProcessGroupNCCL(...)` makes a group of the extension, and all of those are its instances."""

    def __call__(cls, *args: Any) -> Any:
        return _nccl(*args)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, extension().Group)


class ProcessGroupNCCL(metaclass=_Callable):
    """In the place of PyTorch's class, which a PyTorch without CUDA lacks."""

    Options = Options


def replace() -> None:
    """Let `torch.distributed` have NCCL, and Gloo take tensors of the device."""
    c10d: Any = distributed_c10d
    c10d.ProcessGroupNCCL, c10d._NCCL_AVAILABLE = ProcessGroupNCCL, True
    public: Any = dist
    public.ProcessGroupNCCL = ProcessGroupNCCL
    made: weakref.WeakKeyDictionary[Any, tuple[Store, int, int, timedelta]] = weakref.WeakKeyDictionary()
    groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    gloo: Any = ProcessGroupGloo
    construct = gloo.__init__

    def remember(self: Any, store: Store, rank: int, size: int, *rest: Any, **named: Any) -> None:
        construct(self, store, rank, size, *rest, **named)
        given = named.get("timeout", named.get("options", rest[0] if rest else _TIMEOUT))
        made[self] = store, rank, size, getattr(given, "_timeout", given)

    def companion(own: Any) -> Any:  # opened by the first collective of tensors of the device, on all ranks
        if own not in groups:
            store, rank, size, timeout = made[own]
            inner = ProcessGroupGloo(PrefixStore("virtual", store), rank, size, timeout)
            groups[own] = extension().Group(inner, "gloo")
        return groups[own]

    gloo.__init__ = remember
    for name in _METHODS:
        setattr(gloo, name, _for_either(getattr(gloo, name), name, companion))
    register = dist.ProcessGroup._register_backend

    def register_both(self: Any, device: Any, backend_type: Any, backend: Any = None) -> None:
        if device.type == "cuda" and type(backend) is ProcessGroupGloo:
            backend, backend_type = companion(backend), dist.ProcessGroup.BackendType.CUSTOM
        register(self, device, backend_type, backend)

    dist.ProcessGroup._register_backend = register_both  # type: ignore[method-assign]


def _for_either(method: Callable[..., Any], name: str, companion: Callable[[Any], Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **named: Any) -> Any:
        first = args[0] if args else next(iter(named.values()))
        while isinstance(first, list):
            first = first[0]
        if isinstance(first, Tensor) and first.is_cuda:
            return getattr(companion(self), name)(*args, **named)
        return method(self, *args, **named)

    return call


# ---- ranks that are devices of one process ----
class Work:
    """What a lockstep group returns: to wait is to let the current stream wait; until then it keeps the tensors."""

    def __init__(self, done: torch.Event, kept: list[Tensor], device: int) -> None:
        self._done, self._kept, self._device = done, kept, device

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait."""
        current_stream(self._device).wait_event(self._done)
        self._kept = []
        return True

    def is_completed(self) -> bool:
        """Return whether the device has got there."""
        return bool(self._done.query())


class LockstepGroup:
    """One rank's group, where rank r is device r of this process; with the methods of a process group over NCCL."""

    _numbers = itertools.count(1)

    def __init__(self, rank: int, world_size: int, number: int) -> None:
        self._rank, self._world_size, self._number = rank, world_size, number
        self._issued = 0
        self._stream = torch.cuda.Stream(rank)

    @classmethod
    def world(cls, size: int) -> list[LockstepGroup]:
        """Return the groups of all ranks."""
        number = next(cls._numbers)
        return [cls(rank, size, number) for rank in range(size)]

    def rank(self) -> int:
        """Return this rank's number."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._world_size

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        """Sum over the ranks, in place."""
        return self._start(0, tensors, tensors)

    def _allgather_base(self, output: Tensor, tensor: Tensor, options: Any = None) -> Work:
        return self._start(1, [tensor], self._rows(output))

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, out: list[int], given: list[int], options: Any = None
    ) -> Work:
        """Send every rank its row."""
        assert not out and not given, "rows of equal sizes"
        return self._start(2, self._rows(tensor), self._rows(output))

    def _rows(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.view(self._world_size, -1).unbind(0))

    def _start(self, kind: int, sent: list[Tensor], received: list[Tensor]) -> Work:
        self._stream.wait_stream(current_stream(self._rank))
        with torch.cuda.stream(self._stream):
            extension().meet(self._number, self._issued, self._world_size, self._rank, kind, sent, received, 0)
        self._issued += 1
        return Work(self._stream.record_event(), [*sent, *received], self._rank)
