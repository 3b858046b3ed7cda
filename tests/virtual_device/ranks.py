"""The device in the ranks of `run_world`: the schedule is in the environment, and a race is the rank's failure."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tests.virtual_device import building
from tests.virtual_device.device import begin, install, report

RUN = "VIRTUAL_DEVICE"
"""The variable that names a schedule and a seed, as `parse` reads them."""


def environment(run: str) -> dict[str, str]:
    """Return the variables with which ranks have the device."""
    return {RUN: run, "WORLD_AROUND": f"{__name__}:around"}


def parse(run: str) -> tuple[str, int]:
    """Read a run: "late", or "random:1" with a seed."""
    schedule, _, seed = run.partition(":")
    return schedule, int(seed or 0)


@contextlib.contextmanager
def around(rank: int) -> Iterator[None]:
    """Install the device before a rank's function, and fail the rank if there was a race."""
    install()
    schedule, seed = parse(os.environ[RUN])
    begin(schedule, seed + rank)
    yield
    races = report().races
    assert not races, f"races on the device of rank {rank}:\n" + "\n".join(races)


if __name__ != "__main__" and os.environ.get("WORLD_AROUND") is None:
    with contextlib.suppress(building.BuildError):  # who preloads this shares the library with all ranks
        building.load()
