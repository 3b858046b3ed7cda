"""What an engine hands its buckets to: a lane of a line to the other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from commhooks.communicators.collective import Traffic
from commhooks.errors import CommHooksError
from commhooks.scheduling.fused import Fused
from commhooks.scheduling.lanes import Lane
from commhooks.scheduling.ledger import Ledger
from commhooks.scheduling.policy import Fifo, Policy
from commhooks.scheduling.task import BucketTask

POLICIES: dict[str, type[Policy]] = {"fifo": Fifo, "fused": Fused}
"""Orders of collectives, by the name that `attach` takes."""


class Scheduler(ABC):
    """Runs the bucket tasks of one lane, and completes their futures."""

    def __init__(self, number: int, name: str, policy: str) -> None:
        self.lane = Lane(number, name, POLICIES[policy])

    @abstractmethod
    def submit(self, task: BucketTask) -> None:
        """Take a task; its future is eventually completed with the mean or with an error."""

    @abstractmethod
    def wait_until_open(self) -> None:
        """Return when the lane is open on every rank; raise the error that prevented it."""

    @abstractmethod
    def agree(self, fingerprint: str, caller: str) -> None:
        """Return once every rank has passed the same fingerprint; raise `AttachError` or the error that prevented it.

        Called by every rank between the same two steps; `caller` says which call, and when, to ranks that do not make
        it. The statistics do not count it.
        """

    @abstractmethod
    def drain(self, caller: str) -> None:
        """Return when everything handed in has ended, whether or not it succeeded."""

    @abstractmethod
    def failure(self) -> CommHooksError | None:
        """Return the error that ended the work; None while it continues or if it was stopped deliberately."""

    def close(self) -> None:
        """Take no more tasks. The line goes on with those handed in, and with other lanes."""
        self.lane.close()

    @property
    def ledger(self) -> Ledger:
        """The lane's counts."""
        return self.lane.ledger

    def traffic(self) -> Traffic | None:
        """Return the counts of the lane's collectives; None before it is open."""
        return self.lane.traffic

    def working_memory(self) -> list[Tensor]:
        """Return the tensors that are kept between steps."""
        policy = self.lane.policy
        return [] if policy is None else policy.working_memory()
