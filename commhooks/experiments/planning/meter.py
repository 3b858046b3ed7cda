"""Timing the collectives of a group of ranks, in many sizes, for a probe.

Each size is timed once at first; the kind whose largest message takes least time gets a larger one next, as long as a
turn (each kind with each size once) can be repeated often enough in the time given. Turns go through kinds and sizes in
another order each time, so that a disturbance does not always meet the same of them. Every collective begins with all
ranks together, and takes as long as on the slowest of them.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from commhooks.communicators import Collective, Communicator
from commhooks.communicators.collective import CollectiveKind
from commhooks.experiments.planning.errors import ProbeError
from commhooks.experiments.planning.probes import Cost, Timing
from commhooks.experiments.planning.sizes import (
    ATTEMPTS,
    GOOD_TURNS,
    LEAST_SIZES,
    LOOKS,
    MOST_SECONDS,
    REPEATS,
    SIZES,
    SizesToTry,
)
from commhooks.experiments.timing.link import HALF_SUM, plain_kind

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Case = tuple[str, int]
"""A kind of collective, and the bytes each rank contributes."""
_LEAST_TURNS = 4
_MOST_TURNS = 100
_MOST_REPEATED = 8  # measurements of a case in a turn
_LEAST_GROWTH = 1.5  # of a size over the one before it


@dataclass(frozen=True)
class Clocks:
    """A clock, in seconds."""

    wall: Callable[[], float] = time.perf_counter
    processor: Callable[[], float] = time.process_time
    """The CPU time of all threads of this process."""
    settle: Callable[[], None] = lambda: None
    """Return when the device has finished what was started."""


_FIRST = ("all-reduce", HALF_SUM, "all-to-all")
"""The kinds that most hooks send. A probe measures them first at each size, as the time may not suffice for the
others."""


class Meter:
    """Collectives of one group of ranks, timed."""

    def __init__(
        self,
        communicator: Communicator,
        device: torch.device | None,
        clocks: Clocks,
        sizes: Mapping[str, SizesToTry],
    ) -> None:
        self._communicator, self._device, self._clocks = communicator, device, clocks
        self._sizes = sizes  # by kind
        self._collectives: dict[tuple[str, int], Collective] = {}  # new memory would have to be mapped in first

    def measure(self, seconds: float) -> Mapping[str, Cost]:
        """Return each kind's cost, measured for at most `seconds`."""
        begun = self._clocks.wall()
        times = self._choose(seconds)
        mean = sum(times.values()) / len(times)
        # What takes little is measured more often: a part of a turn is for that.
        small = (REPEATS - 1) * mean
        repeated = [case for case, each in times.items() for _ in range(int(min(_MOST_REPEATED, max(1, small / each))))]
        turn = sum(times[case] for case in repeated)
        left = seconds - (self._clocks.wall() - begun)
        own = int(min(_MOST_TURNS, max(GOOD_TURNS, left / turn)))
        turns = round(self._meet(own) / self._communicator.world_size)  # ranks' clocks differ: all take as many
        found = self._turns(repeated, turns, begun + seconds)
        return {
            kind: Cost(
                tuple(Timing.of(case[1], *zip(*found[case], strict=True)) for case in sorted(times) if case[0] == kind)
            )
            for kind in self._sizes
        }

    def _choose(self, seconds: float) -> dict[Case, float]:
        """Return the kinds and sizes that can be measured often enough in `seconds`, and the time of each."""
        most = seconds / (LOOKS + REPEATS * GOOD_TURNS)
        if_needed = ATTEMPTS * seconds / (LOOKS + REPEATS * _LEAST_TURNS)  # then there will be one attempt
        found: dict[Case, float] = {}
        for size, kind in itertools.product(SIZES[:LEAST_SIZES], self._sizes):
            found |= self._look((kind, size))
            if sum(found.values()) > if_needed:  # on all ranks, as times are those of the slowest
                raise ProbeError(
                    f"the network is too slow for the time given: {kind} of {size:,} bytes took "
                    f"{1e3 * found[kind, size]:.0f} ms, barrier included, and at least {_LEAST_TURNS} turns of all "
                    f"kinds and sizes are needed; probe for longer (seconds=, at most {MOST_SECONDS:g})."
                )
        largest = dict.fromkeys(self._sizes, SIZES[LEAST_SIZES - 1])
        growing = {
            kind: list(tried.sizes[LEAST_SIZES:])
            for kind, tried in self._sizes.items()
            if len(tried.sizes) > LEAST_SIZES
        }
        stopped: dict[str, int] = {}
        while growing:
            kind = min(growing, key=lambda one: (growing[one][0], one not in _FIRST))
            size = growing[kind][0]
            # Four times as large takes at least twice as long, on any but a short message.
            least = max(1.0, size / largest[kind] / 2) * found[kind, largest[kind]]
            limit = if_needed if size <= self._sizes[kind].needed else most
            if sum(found.values()) + least <= limit and self._adds(found, (kind, size), limit):
                largest[kind] = growing[kind].pop(0)
            else:
                stopped[kind] = growing[kind][0]
            if kind in stopped or not growing[kind]:
                del growing[kind]
        self._fill(found, {kind: (largest[kind], size) for kind, size in stopped.items()}, most)
        return found

    def _fill(self, found: dict[Case, float], stopped: Mapping[str, tuple[int, int]], most: float) -> None:
        """Add a size for each kind between the largest so far and the one that took too long, as the time allows."""
        taken = sum(found[kind, largest] for kind, (largest, _) in stopped.items())
        growth = (most - sum(found.values())) / taken if taken else 0.0
        for kind, (largest, too_large) in stopped.items() if growth >= _LEAST_GROWTH else ():
            size = min(int(growth * largest), too_large) // 1024 * 1024
            self._adds(found, (kind, size), most)

    def _adds(self, found: dict[Case, float], case: Case, most: float) -> bool:
        """Look at a case, and add it if a turn is not too long then; return whether it was added."""
        time = self._look(case)
        if sum(found.values()) + time[case] > most:
            return False
        found |= time
        return True

    def _look(self, case: Case) -> dict[Case, float]:
        """Time a case once, barrier included; all ranks get the same number."""
        self._time(*case)  # memory is allocated, and connections are made, the first time
        return {case: float(self._slowest([self._whole(*case)])[0, 0])}

    def _turns(self, cases: list[Case], turns: int, deadline: float) -> Mapping[Case, list[tuple[float, float]]]:
        """Return the (seconds, processor seconds) of each case's collectives, in the order of turns."""
        order: list[Case] = []
        own: list[tuple[float, float]] = []
        for turn in range(turns):
            shuffled = random.Random(turn).sample(cases, len(cases))
            order += shuffled
            own += [self._time(*case) for case in shuffled]
            is_late = self._clocks.wall() > deadline
            if self._meet(float(is_late)) and turn + 1 >= _LEAST_TURNS:
                break
        found: dict[Case, list[tuple[float, float]]] = {}
        for case, (seconds, processor) in zip(order, self._slowest(own).tolist(), strict=True):
            found.setdefault(case, []).append((seconds, processor))
        return found

    def _whole(self, kind: str, payload: int) -> tuple[float, float]:
        """Return the seconds of one measurement, the meeting before it included."""
        begun = self._clocks.wall()
        self._time(kind, payload)
        return self._clocks.wall() - begun, 0.0

    def _time(self, kind: str, payload: int) -> tuple[float, float]:
        """Return the seconds and processor seconds of one collective on this rank."""
        if (kind, payload) not in self._collectives:
            self._collectives[kind, payload] = self._collective(kind, payload)
        collective = self._collectives[kind, payload]
        self._meet()
        used, begun = self._clocks.processor(), self._clocks.wall()
        self._communicator.start(collective).wait()
        self._clocks.settle()
        return self._clocks.wall() - begun, self._clocks.processor() - used

    def _collective(self, kind: str, payload: int) -> Collective:
        """Return a collective of about this many bytes: all its rows have the same length."""
        dtype = torch.float16 if kind == HALF_SUM else torch.float32
        name = cast(CollectiveKind, plain_kind(kind))
        elements = payload // dtype.itemsize
        has_rows = kind in {"all-to-all", "reduce-scatter"}
        shape = (
            (self._communicator.world_size, max(1, elements // self._communicator.world_size))
            if has_rows
            else (elements,)
        )
        return Collective(name, torch.zeros(shape, dtype=dtype, device=self._device))

    def _meet(self, number: float = 0.0) -> float:
        """Return when all ranks have come, with the sum of their numbers."""
        return sum_of(self._communicator, number, self._device)

    def _slowest(self, times: list[tuple[float, float]]) -> Array:
        """Return, for each pair of this rank's times, the slowest rank's seconds and the mean processor seconds."""
        own = torch.tensor(times, dtype=torch.float64, device=self._device)
        pending = self._communicator.start(Collective("all-gather", own))
        pending.wait()
        every = pending.result.cpu().numpy()
        return np.stack([every[..., 0].max(axis=0), every[..., 1].mean(axis=0)], axis=-1)


def sum_of(communicator: Communicator, number: float, device: torch.device | None) -> float:
    """Return the sum of the ranks' numbers, once all of them have come."""
    pending = communicator.start(Collective("all-reduce", torch.tensor([number], dtype=torch.float32, device=device)))
    pending.wait()
    return float(pending.result.item())
