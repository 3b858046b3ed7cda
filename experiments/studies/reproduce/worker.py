"""The worker of the studies between hosts, whose runs take turns with others', and the world that its ranks are in."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commhooks.experiments.cluster import INTERFACE, hosts_on, interface_bytes
from commhooks.experiments.launch import RankFunction, Tell, run_world
from commhooks.experiments.links.link import LinkSettings

_TIMEOUT_SECONDS = 240.0  # without a message
_SETTING_SECONDS = 1.0  # for the process that made the hosts to set the rate of their links: much longer than it takes
_MEANS = ("moved", "carried")  # of which the mean over the ranks counts; of others, the slowest rank's


@dataclass(frozen=True)
class NewRate:
    """Rank 0 asks for another rate of all links, in bits per second; None: no limit."""

    rate: float | None


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


def ask_for(rate: float | None, send: Callable[[object], None]) -> None:
    """Ask for a rate of all links, and wait until it is set; every rank calls this, and rank 0's message counts."""
    send(NewRate(rate))
    time.sleep(_SETTING_SECONDS)


def on_hosts(function: RankFunction, argument: Any, hosts: int, tell: Tell, *, has_hosts: bool) -> list[Any]:
    """Call a function on new ranks, whose links have the rates that it asks for; return what rank 0 sends beside text.

    Args:
        function: Called as by `run_world`.
        argument: What it is given.
        hosts: The number of hosts, with one rank each.
        tell: Called here with each text that rank 0 sends, as progress.
        has_hosts: Whether hosts are made (network namespaces), with links that have no limit at first; otherwise the
            ranks are on the loopback, and rates that are asked for change nothing.

    """
    found: list[Any] = []
    with hosts_on(LinkSettings(kind="hosts") if has_hosts else LinkSettings(), hosts) as cluster:

        def hear(message: object) -> None:
            if isinstance(message, str):
                tell(message)
            elif not isinstance(message, NewRate):
                found.append(message)
            elif cluster is not None:
                cluster.set_rate(message.rate)

        run_world(function, hosts, argument, hear, timeout=_TIMEOUT_SECONDS, cluster=cluster)
    return found
