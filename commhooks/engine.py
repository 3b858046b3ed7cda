"""What ties one model's compressor, state, scheduler and statistics together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.communicators import ProcessGroupCommunicator
from commhooks.compressor import BucketView, Compressor, Context, Slot
from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.connection import Address, Connection, WrapCommunicator
from commhooks.errors import GradientError
from commhooks.scheduler import InlineScheduler, Scheduler, ThreadScheduler
from commhooks.state import StateTable
from commhooks.statistics import Statistics
from commhooks.task import BucketTask


class Bucket(Protocol):
    """Be what both DDPs hand to a hook, as far as an engine needs it."""

    def index(self) -> int: ...  # noqa: D102
    def buffer(self) -> Tensor: ...  # noqa: D102
    def parameters(self) -> list[Tensor]: ...  # noqa: D102
    def is_last(self) -> bool: ...  # noqa: D102


class Engine:
    """Average buckets with one compressor: hand-in on the training thread, everything else on the scheduler.

    It holds no reference to the process group (but on NCCL, through a proxy), so that a group which is destroyed is
    free.
    """

    def __init__(
        self,
        compressor: Compressor,
        process_group: dist.ProcessGroup,
        *,
        label: str = "attached",
        terms: str = "",
        wrap_communicator: WrapCommunicator | None = None,
        hook_timeout: float | None = None,
    ) -> None:
        self.compressor = compressor
        self.state = StateTable()
        self.step = 0
        self._process_group = weakref.ref(process_group)
        self._address = Address.under(process_group, label)
        self._terms = f"compressor {compressor!r}\n{terms}"
        self._wrap = wrap_communicator
        self._hook_timeout = hook_timeout
        self._scheduler: Scheduler | None = None
        self._views: dict[tuple[int, ...], BucketView] = {}
        self._parameters: dict[tuple[int, ...], list[Tensor]] = {}
        self._used: set[tuple[int, ...]] = set()

    def run(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Take a bucket, and return the future of its mean; called in the same order on every rank."""
        memory = bucket.buffer()
        compressor = self._compressor_for(memory, bucket)
        view = self._view(bucket, memory) if compressor.uses_slots else BucketView(bucket.index(), memory)
        context = Context(self._address.rank, self._address.world_size, self.step)
        task = BucketTask(
            exchange=compressor.compress(view, context),
            future=_future_for(memory),
            memory=memory,
            step=self.step,
            index=bucket.index(),
            is_last=bucket.is_last(),
            parameters=lambda: self.describe(bucket.parameters()),
            ready=_event_for(memory),
        )
        self._scheduler_for(memory.device).submit(task)
        if task.is_last:
            self._end_step()
        return task.future

    def open(self, device: torch.device) -> None:
        """Connect to the other ranks now, and not at the first bucket."""
        self._scheduler_for(device).wait_until_open()

    def stop(self) -> None:
        """End the scheduler."""
        if self._scheduler is not None:
            self._scheduler.stop()

    def statistics(self) -> Statistics:
        """Return what was counted so far."""
        return self._scheduler.ledger.totals(self._scheduler.traffic()) if self._scheduler else Statistics()

    def last_step(self) -> Statistics:
        """Return what the last whole step counted."""
        return self._scheduler.ledger.last_step() if self._scheduler else Statistics()

    def describe(self, parameters: Sequence[Tensor]) -> str:
        """Name parameters for a message; their shapes where nobody told the names."""
        names = [self.state.name_of(parameter) or f"one of shape {tuple(parameter.shape)}" for parameter in parameters]
        shown = ", ".join(names[:8])
        return f"parameters {shown}" if len(names) <= 8 else f"parameters {shown} and {len(names) - 8} more"

    def _compressor_for(self, memory: Tensor, bucket: Bucket) -> Compressor:
        if not (memory.is_floating_point() or memory.is_complex()):
            raise GradientError(
                f"bucket {bucket.index()} ({self.describe(bucket.parameters())}) holds gradients "
                f"of dtype {memory.dtype}; a mean needs a floating-point or complex dtype."
            )
        return self.compressor if self.compressor.takes(memory) else AllReduceMean()

    def _view(self, bucket: Bucket, memory: Tensor) -> BucketView:
        """Return the bucket's view, the one of the last step if parameters and memory are the same."""
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        self._used.add(key)
        view = self._views.get(key)
        if view is None or view.memory.data_ptr() != memory.data_ptr() or view.memory.dtype != memory.dtype:
            self._learn_names(bucket, parameters)
            view = BucketView(bucket.index(), memory, self._slots(memory, parameters))
            self._views[key] = view
            self._parameters[key] = parameters  # while they live, no other object has their id
        return view

    def _slots(self, memory: Tensor, parameters: list[Tensor]) -> list[Slot]:
        sizes = [parameter.numel() for parameter in parameters]
        if sum(sizes) != memory.numel():
            raise GradientError(
                f"a bucket of {memory.numel()} elements was handed in for parameters of {sum(sizes)} elements "
                f"({self.describe(parameters)})."
            )
        parts = memory.detach().split(sizes)
        return [Slot(*pair, self.state.of(pair[0])) for pair in zip(parameters, parts, strict=True)]

    def _learn_names(self, bucket: Bucket, parameters: list[Tensor]) -> None:
        names: Callable[[], list[str]] | None = getattr(bucket, "names", None)
        if names is not None and any(self.state.name_of(parameter) is None for parameter in parameters):
            self.state.bind(zip(names(), parameters, strict=True))

    def _end_step(self) -> None:
        self.step += 1
        for key in self._views.keys() - self._used:
            del self._views[key], self._parameters[key]
        self._used.clear()

    def _scheduler_for(self, device: torch.device) -> Scheduler:
        if self._scheduler is None:
            self._scheduler = self._make_scheduler(device)
        return self._scheduler

    def _make_scheduler(self, device: torch.device) -> Scheduler:
        process_group = self._process_group()
        if process_group is not None and backend_of(process_group, device) == "nccl":
            # A proxy: the engine is found by its group, and must not keep it alive.
            communicator: Any = ProcessGroupCommunicator(weakref.proxy(process_group))
            return InlineScheduler(self._wrap(communicator) if self._wrap else communicator, device)
        address, terms, wrap = self._address, self._terms, self._wrap
        return ThreadScheduler(lambda: Connection(address, terms, wrap), address.rank, self._hook_timeout)


def backend_of(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that a process group uses for a device, such as "gloo"."""
    by_device = dict(part.split(":", 1) for part in str(dist.get_backend_config(process_group)).split(","))
    return by_device.get(device.type, "gloo")


def _future_for(memory: Tensor) -> torch.futures.Future[Tensor]:
    return torch.futures.Future(devices=[memory.device]) if memory.is_cuda else torch.futures.Future()


def _event_for(memory: Tensor) -> Any:
    return torch.cuda.current_stream(memory.device).record_event() if memory.is_cuda else None
