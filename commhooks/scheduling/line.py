"""One rank's line to the others: its number, and the scheduler, chosen once the gradients' device is known."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commhooks.communicators import ProcessGroupCommunicator
from commhooks.communicators.connection import Address, Agreements, WrapCommunicator
from commhooks.communicators.parent_group import backend_of, warn_of_bypass
from commhooks.scheduling.inline import InlineScheduler, SideStream
from commhooks.scheduling.scheduler import Scheduler
from commhooks.scheduling.thread import ThreadScheduler


class Line(Protocol):
    """One rank's line to the others: its number, and the scheduler through which it reaches them."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        ...

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def policy(self) -> str:
        """The name of the order of collectives."""
        ...

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler; None before `open`."""
        ...

    def carries_groups(self, device: torch.device) -> bool:
        """Return whether requests may name a group of some of the ranks, for gradients on this device."""
        ...

    def open(self, device: torch.device, fingerprint: str) -> Scheduler:
        """Return the scheduler, created by the first call; every rank must pass the same fingerprint."""
        ...


class ProcessGroupLine:
    """A line beside a process group; it does not keep the group alive, so that a destroyed group is freed."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        *,
        label: str = "attached",
        policy: str = "fifo",
        wrap_communicator: WrapCommunicator | None = None,
        hook_timeout: float | None = None,
        may_bypass: bool = False,
    ) -> None:
        self.policy = policy
        self.scheduler: Scheduler | None = None
        self._process_group = weakref.ref(process_group)
        self._address = Address.under(process_group, label)
        self._wrap = wrap_communicator
        self.hook_timeout = hook_timeout
        self._may_bypass = may_bypass  # the user knows that a group without Gloo only provides its ranks

    @property
    def rank(self) -> int:
        """The number of this rank in the process group."""
        return self._address.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the process group."""
        return self._address.world_size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group, or None if it was destroyed."""
        return self._process_group()

    @property
    def timeout(self) -> float:
        """The process group's timeout, in seconds."""
        return self._address.timeout.total_seconds()

    def carries_groups(self, device: torch.device) -> bool:
        """Return True unless this is NCCL, on which groups would need communicators of their own."""
        return self._backend(device) != "nccl"

    def open(self, device: torch.device, fingerprint: str) -> Scheduler:
        """Return the scheduler; on NCCL every rank has come by then, otherwise its thread waits for them."""
        if self.scheduler is None:
            self.scheduler = self._make_scheduler(device, fingerprint)
        return self.scheduler

    def _backend(self, device: torch.device) -> str:
        process_group = self._process_group()
        return backend_of(process_group, device) if process_group is not None else "gloo"

    def _make_scheduler(self, device: torch.device, fingerprint: str) -> Scheduler:
        process_group, backend = self._process_group(), self._backend(device)
        if backend != "nccl":
            if process_group is not None and backend != "gloo" and not self._may_bypass:
                warn_of_bypass(process_group, backend)
            return ThreadScheduler(self._address, fingerprint, self._wrap, self.policy, self.hook_timeout)
        assert process_group is not None, "its backend was just asked for"
        # A proxy: an engine is found by its group, and must not keep it alive.
        carrier: Any = ProcessGroupCommunicator(weakref.proxy(process_group))
        agreements = Agreements(carrier, self._address, device)
        communicator = self._wrap(carrier) if self._wrap else carrier
        board = self._address.noticeboard()
        inline = InlineScheduler(
            communicator, agreements.agree, SideStream(device), self.policy, self.hook_timeout, board
        )
        inline.agree(fingerprint)
        return inline
