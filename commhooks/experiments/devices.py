"""The device on which runs train: which one it is, the backend of its ranks, its clock and its memory.

The only file of the experiments that knows devices. Queued work and streams are the matter of `commhooks.devices`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from commhooks.communicators.parent_group import backend_of
from commhooks.devices import ACCELERATOR, copied_to, model_of, runs_on_streams, wait_for_device

if TYPE_CHECKING:
    from commhooks.experiments.links.link import LinkSettings

CPU = torch.device("cpu")
DEVICES = (CPU.type, ACCELERATOR.type)
AUTO = "auto"
NCCL = "cpu:gloo,cuda:nccl"  # tensors on the CPU, such as what ranks tell each other of their records, need Gloo
WHY_GLOO = "the emulation of a link waits on the host, for which NCCL does not"


# --- the choice -------------------------------------------------------------------------------------------------------


def check_device(device: str) -> None:
    """Raise ValueError if no device has this name."""
    if device not in (*DEVICES, AUTO):
        raise ValueError(f"device {device!r} is not known: expected {', '.join(DEVICES)} or {AUTO}")


def chosen(device: str | None) -> str:
    """Return the kind of device to train on: the named one, or for "auto" and None a GPU if there is one, else the CPU.

    Raises:
        ValueError: There is no such kind, or no GPU.

    """
    device = device or AUTO
    check_device(device)
    has_gpu = torch.cuda.is_available()
    if device == ACCELERATOR.type and not has_gpu:
        why = "" if torch.version.cuda or torch.version.hip else f", and PyTorch {torch.__version__} is built without"
        raise ValueError(f"device 'cuda': there is no GPU for use here{why}; leave --device out to train on the CPU")
    return device if device != AUTO else ACCELERATOR.type if has_gpu else CPU.type


def own_device(kind: str) -> torch.device:
    """Return the device on which this process trains, and make it the current one.

    Ranks of a machine take its GPUs in turn, in the order of torchrun's LOCAL_RANK.

    Raises:
        ValueError: There is no GPU.

    """
    if chosen(kind) == CPU.type:
        return CPU
    own = torch.device(ACCELERATOR.type, int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def in_words(device: torch.device) -> str:
    """Return a device's model, or 'CPU'."""
    return "CPU" if device.type == CPU.type else model_of(device)


# --- the backend ------------------------------------------------------------------------------------------------------


def backend_for(device: str, link: LinkSettings, ranks: int) -> str:
    """Return the backend of ranks: NCCL if each has a GPU of its own and the link is not made slower here, else Gloo.

    Args:
        device: The kind of device.
        link: The link between the ranks.
        ranks: The number of ranks on this machine.

    """
    is_own = device == ACCELERATOR.type and ranks <= torch.cuda.device_count()
    return NCCL if is_own and not link.is_limited else "gloo"


def backend_in_use(device: torch.device) -> str:
    """Return the backend of the default process group for tensors on a device."""
    world = dist.group.WORLD
    assert world is not None, "ranks have a process group"
    return backend_of(world, device)


def uses_streams(device: torch.device) -> bool:
    """Return whether streams, not the host, wait for the default process group's collectives on a device."""
    return runs_on_streams(backend_in_use(device))


# --- batches ----------------------------------------------------------------------------------------------------------


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device: itself on the CPU. Nested lists, tuples and dicts are moved too.

    An object of another class is moved by its own method `to`, if it has one.
    """
    if device.type == CPU.type:
        return batch
    return pytree.tree_map(lambda leaf: _moved(leaf, device), batch)


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        return copied_to(device, leaf)
    return leaf.to(device) if hasattr(leaf, "to") else leaf


# --- the clock --------------------------------------------------------------------------------------------------------


Moment = Any
"""A moment of a `Stopwatch`: seconds of the host's clock on the CPU, an event in the device's queue elsewhere."""


class Stopwatch:
    """Moments at which a device reaches what is queued, as seconds of the host's clock.

    On a CPU nothing is queued, and a moment is the time at which it is taken.
    """

    def __init__(self, device: torch.device = CPU, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self.is_queued: bool = device.type != CPU.type

    def start(self) -> Moment:
        """Wait until the device is idle, and return the moment: from then on both clocks run together."""
        if self.is_queued:
            wait_for_device(self._device)
            self._first, self._began = self.now(), self._clock()
            return self._first
        return self._clock()

    def now(self) -> Moment:
        """Return the moment at which the device reaches everything queued so far on the current stream."""
        if not self.is_queued:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_at(self, moment: Moment) -> float:
        """Return a moment as seconds of the host's clock, once the device has reached it."""
        if not self.is_queued:
            return float(moment)
        moment.synchronize()
        return self._began + float(self._first.elapsed_time(moment)) / 1e3


def idle_clock(device: torch.device) -> float:
    """Return the time once a device has done everything queued on this thread's current stream."""
    torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


# --- memory -----------------------------------------------------------------------------------------------------------


class PeakMemory:
    """The most bytes of a device that one of several runs on it held, by the device's allocator; None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held = 0
        self.peak = None if device.type == CPU.type else 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Return a context in which the run alone allocates."""
        if self.peak is None:
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        most = torch.cuda.max_memory_allocated(self._device) - before
        self.peak = max(self.peak, self._held + most)
        self._held += torch.cuda.memory_allocated(self._device) - before
