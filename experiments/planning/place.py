"""The places of ranks: which of them share a host and its processors."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from commhooks.communicators.ranks import Ranks

from ..machine import usable_processors


@dataclass(frozen=True)
class Place:
    """One rank's knowledge of its machine."""

    host: str
    """A network name. Hosts in network namespaces, and containers, may share a machine."""
    machine: str
    """An identifier of the machine: the number that Linux draws when it boots, if available."""
    processors: frozenset[int]
    """The processors that this rank may use."""
    threads: int
    """The threads that one computation of this rank uses."""
    local_ranks: int
    """The number of ranks on its host, according to the launcher; 0: unknown."""

    @classmethod
    def here(cls) -> Place:
        """Return this rank's."""
        number = Path("/proc/sys/kernel/random/boot_id")
        host = socket.gethostname()
        return cls(
            host,
            number.read_text(encoding="ascii").strip() if number.exists() else host,
            usable_processors(),
            torch.get_num_threads(),
            int(os.environ.get("LOCAL_WORLD_SIZE", "0")),
        )


def ranks_per_host(places: Sequence[Place]) -> int:
    """Return how many ranks the fullest host has."""
    return max(place.local_ranks or sum(one.host == place.host for one in places) for place in places)


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
