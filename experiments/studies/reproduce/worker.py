"""The worker of the studies between hosts, whose runs take turns with others'."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from commhooks.experiments.cluster import INTERFACE, interface_bytes
from commhooks.experiments.launch import Send
from experiments.studies.ranks import NewRate

_SETTING_SECONDS = 1.0  # for the process that made the hosts to set the rate of their links: much longer than it takes
_MEANS = ("moved", "carried")  # of which the mean over the ranks counts; of others, the slowest rank's


class Worker(ABC):
    """A model with one way to communicate, whose turns are timed and their bytes counted."""

    has_hosts: bool
    """Whether the rank is on a host of its own, whose interface can be asked."""

    @abstractmethod
    def run(self) -> Mapping[str, float]:
        """Take the steps of a turn, and return what else is measured in it."""

    @abstractmethod
    def moved(self) -> float:
        """Return the bytes that this rank has counted so far."""

    @abstractmethod
    def close(self) -> None:
        """End the communication."""

    def turn(self) -> dict[str, float]:
        """Take a turn that begins on all ranks together; return its seconds, the bytes counted and carried, and more.

        `carried` are the bytes that the host's interface sent, 0 without hosts.
        """
        dist.barrier()
        moved, carried = self.moved(), self._carried()
        began = time.perf_counter()
        more = self.run()
        seconds = time.perf_counter() - began
        dist.barrier()  # what the other ranks still send is this turn's
        return {"seconds": seconds, **more, "moved": self.moved() - moved, "carried": self._carried() - carried}

    def _carried(self) -> float:
        return float(interface_bytes(INTERFACE)[0]) if self.has_hosts else 0.0


def over_ranks(turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return each value of a worker's turns, one for each turn; every rank calls this.

    Of bytes it is the mean over the ranks, of times the one of the rank where it took longest.
    """
    found = {}
    for name in turns[0]:
        values = torch.tensor([turn[name] for turn in turns], dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.SUM if name in _MEANS else dist.ReduceOp.MAX)
        found[name] = (values / dist.get_world_size() if name in _MEANS else values).tolist()
    return found


def ask_for(rate: float | None, send: Send) -> None:
    """Ask for a rate of all links, and wait until it is set; every rank calls this, and rank 0's message counts."""
    send(NewRate(rate))
    time.sleep(_SETTING_SECONDS)
