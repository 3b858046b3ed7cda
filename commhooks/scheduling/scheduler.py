"""The single owner of the order in which collectives are issued, and of failure.

Collectives are issued in one place, in the order that the policy determines. Except on NCCL that place is a thread,
since a hook must not hold up the backward pass (thread.py). On NCCL a stream waits instead, and requests are issued
inline (inline.py). In one process, workers take turns (lockstep.py).
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
    """Runs bucket tasks, and completes their futures."""

    ledger: Ledger

    @abstractmethod
    def submit(self, task: BucketTask) -> None:
        """Take a task; its future is eventually completed with the mean or with an error."""

    @abstractmethod
    def wait_until_open(self) -> None:
        """Return when the line to the other ranks is open; raise the error that prevented it."""

    @abstractmethod
    def agree(self, fingerprint: str) -> None:
        """Return once every rank has passed the same fingerprint; raise `AttachError` or the error that prevented it.

        Called by every rank between the same two steps. The statistics do not count it.
        """

    @abstractmethod
    def failure(self) -> CommHooksError | None:
        """Return the error that ended the work; None while it continues or if it was stopped deliberately."""

    @abstractmethod
    def traffic(self) -> Traffic | None:
        """Return the communicator's counts; None before there is a communicator."""

    @abstractmethod
    def working_memory(self) -> list[Tensor]:
        """Return the tensors that are kept between steps."""

    @abstractmethod
    def stop(self) -> None:
        """Stop, and release everything held. Unfinished tasks fail."""
