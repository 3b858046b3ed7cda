"""The one owner of the order in which collectives are issued, and of failure.

Collectives are issued from one place, in the order that the policy gives. Off NCCL that place is a thread: a hook
must not hold up the backward pass (thread.py). On NCCL a stream does the waiting, and requests are issued inline
(inline.py). In one process, workers take turns (lockstep.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from commhooks.communicators.traffic import Traffic
from commhooks.errors import CommHooksError
from commhooks.scheduling.fused import Fused
from commhooks.scheduling.ledger import Ledger
from commhooks.scheduling.policy import Fifo, Policy
from commhooks.scheduling.task import BucketTask

POLICIES: dict[str, type[Policy]] = {"fifo": Fifo, "fused": Fused}
"""Orders of collectives, by the name that `attach` takes."""


class Scheduler(ABC):
    """Run bucket tasks, and complete their futures."""

    ledger: Ledger

    @abstractmethod
    def submit(self, task: BucketTask) -> None:
        """Take a task; its future is completed with the mean, or with the error, sooner or later."""

    @abstractmethod
    def wait_until_open(self) -> None:
        """Return when the line to the other ranks stands; raise what kept it from standing."""

    @abstractmethod
    def agree(self, fingerprint: str) -> None:
        """Return when every rank has come with the same fingerprint; raise `AttachError`, or what kept one from coming.

        Called by every rank between the same two steps. Nothing is counted in the statistics.
        """

    @abstractmethod
    def failure(self) -> CommHooksError | None:
        """Return what ended the work, other than being told to; None while it goes on."""

    @abstractmethod
    def traffic(self) -> Traffic | None:
        """Return the communicator's counts; None before there is a communicator."""

    @abstractmethod
    def working_memory(self) -> list[Tensor]:
        """Return the tensors that are kept from step to step."""

    @abstractmethod
    def stop(self) -> None:
        """End, and drop what is held. Tasks that are not done fail."""
