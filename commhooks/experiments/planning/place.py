"""The places of ranks: which of them share processors."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from commhooks.communicators.ranks import Ranks
from commhooks.experiments.machine import usable_processors


@dataclass(frozen=True)
class Place:
    """One rank's knowledge of its machine."""

    machine: str
    """An identifier of the machine, which hosts in network namespaces and containers may share: the number that Linux
    draws when it boots, if available."""
    processors: frozenset[int]
    """The processors that this rank may use."""
    threads: int
    """The threads that one computation of this rank uses."""

    @classmethod
    def here(cls) -> Place:
        """Return this rank's."""
        number = Path("/proc/sys/kernel/random/boot_id")
        return cls(
            number.read_text(encoding="ascii").strip() if number.exists() else socket.gethostname(),
            usable_processors(),
            torch.get_num_threads(),
        )


def free_cores(places: Sequence[Place]) -> int:
    """Return 2 if every rank has a processor for its worker thread besides those that compute, otherwise 1.

    Ranks share a processor if they run on one machine and may both use it.
    """
    for own in places:
        sharing = [one for one in places if one.machine == own.machine and one.processors & own.processors]
        if len(own.processors) // len(sharing) <= own.threads:
            return 1
    return 2


def places_of(ranks: Ranks) -> list[Place]:
    """Return the places of all ranks."""
    return ranks.gather("say where it runs", Place.here)
