"""Install the device, begin a run under a schedule, and say what was seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tests.virtual_device import building

SCHEDULES = ("eager", "late", "random", "empty")
"""eager: the device keeps up with the host. late: nothing runs before the host waits, and then only what that needs.
random: any stream that can go on, at random speeds; runs of one thread repeat exactly for the same seed.
empty: kernels are counted and not run, so that the host's own time is left."""

_extension: ModuleType | None = None


@dataclass(frozen=True)
class HostWait:
    """A place where the host waits for the device."""

    what: str  # an operator, or "event.synchronize", "stream.synchronize", "synchronize"
    place: str  # file:line of the innermost code that is not PyTorch's


@dataclass(frozen=True)
class Report:
    """What was seen since `begin`."""

    kernels: int
    races: tuple[str, ...]
    host_waits: Counter[HostWait]


def extension() -> Any:
    """Return the extension; `install` must have been called."""
    assert _extension is not None, "the virtual device is not installed"
    return _extension


def is_installed() -> bool:
    """Return whether this process has the device."""
    return _extension is not None


def install() -> None:
    """Make this process one with two CUDA devices, until it ends.

    Raises `building.BuildError` if the device cannot be compiled, and `RuntimeError` if this PyTorch has CUDA itself.
    """
    global _extension
    if _extension is not None:
        return
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise RuntimeError(
            f"the virtual device is for a PyTorch without CUDA, and this one ({torch.__version__}) has it"
        )
    loaded = building.load()
    loaded.install()
    _extension = loaded
    from tests.virtual_device import backends, torch_cuda

    torch_cuda.replace()
    backends.replace()


def begin(schedule: str, seed: int = 0, eagerness: float = 0.3) -> None:
    """Finish what is queued, forget what was seen, and go on under another schedule.

    `eagerness` is random's: the probability that something runs whenever something is queued.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is not known: expected one of {', '.join(SCHEDULES)}")
    from tests.virtual_device import torch_cuda

    extension().begin(seed, SCHEDULES.index(schedule), eagerness)
    torch_cuda.begin_pools_again()


def report() -> Report:
    """Return what was seen since `begin`, of everything that was queued: the host waits for it first."""
    device = extension()
    waits = Counter(HostWait(*wait) for wait in device.host_waits())
    for number in range(device.device_count()):
        device.synchronize(number)
    return Report(device.kernels(), tuple(device.races()), waits)
