"""The places of ranks: which of them share a host and its processors."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from commhooks.communicators.ranks import Ranks
from commhooks.units import counted


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


def usable_processors() -> frozenset[int]:
    """Return the numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def processor_name() -> str:
    """Return the processor's model name, if Linux provides it."""
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load_average() -> float | None:
    """Return how many processes were runnable over the last minute, on average; None if the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def machine_in_words() -> str:
    """Return the kind of machine: nothing that identifies it."""
    return f"{counted(len(usable_processors()), 'core')}, {processor_name()}, {platform.system()} {platform.machine()}"
