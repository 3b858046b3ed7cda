"""Measuring a probe: every collective that compressors use, over a group like the one that carries gradients.

Sizes grow as long as a turn (each kind with each size once) can be repeated often enough in the time given. Turns go
through kinds and sizes in another order each time, so that a disturbance does not always meet the same of them. Every
collective begins with all ranks together, and takes as long as on the slowest of them.
"""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from commhooks.communicators import Collective, Communicator, ProcessGroupCommunicator
from commhooks.communicators.collective import CollectiveKind
from commhooks.communicators.connection import Address, WrapCommunicator, open_connection
from commhooks.communicators.parent_group import backend_of
from commhooks.errors import ProbeError
from commhooks.language.requests import Group, ranks_in
from commhooks.planning.links import HALF_SUM, plain_kind
from commhooks.planning.probe import MEASURED, Cost, Probe, Timing

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Case = tuple[str, int]
"""A kind of collective, and the bytes that a rank puts in."""
SIZES = tuple(4**power for power in range(4, 13))
"""Bytes that a rank puts in: 256 B to 16 MiB."""
LEAST_SECONDS, MOST_SECONDS = 1.0, 28.0
_LEAST_TURNS = 8
_GOOD_TURNS = 24  # higher: steadier medians, but smaller messages on a slow link
_MOST_TURNS = 100
_MOST_REPEATED = 8  # measurements of a case in a turn
_LEAST_SIZES = 3
_MOST_BYTES = 2**28  # of an answer: what many ranks gather
_CLOSING_SECONDS = 5.0


@dataclass(frozen=True)
class Clocks:
    """What measures time, in seconds."""

    wall: Callable[[], float] = time.perf_counter
    processor: Callable[[], float] = time.process_time
    """Of all threads of this process."""
    settle: Callable[[], None] = lambda: None
    """Return when the device has finished what was started."""


def probe(
    process_group: dist.ProcessGroup | None = None,
    *,
    seconds: float = 20.0,
    ranks_per_host: int | None = None,
    device: torch.device | str | None = None,
    wrap_communicator: WrapCommunicator | None = None,
    link: str = "",
    unsteady: bool = False,
) -> Probe:
    """Measure the collectives that compressors use between the ranks of a group; all of them must call it.

    They pass a private Gloo group, like that of an attachment; on NCCL, the group itself. If machines have several
    ranks each, collectives inside machines and between them are measured too, as `Hierarchical` uses them.

    Args:
        process_group: The ranks; default: the default group.
        seconds: The time it may take, 1 to 28. Higher: larger messages over a slow link, steadier medians.
        ranks_per_host: How many consecutive ranks form a machine; default: torchrun's LOCAL_WORLD_SIZE.
        device: Where gradients are; default: the GPU if the group uses NCCL, else the processor.
        wrap_communicator: As for `attach`.
        link: What carries it, in words; kept in the result.
        unsteady: Report even if two halves of the measurement disagree; predictions are then as much less certain.

    Raises:
        ProbeError: There is no group or only one rank; the network is too slow for the time given; or two halves of the
            measurement disagree by more than 10 %, also when it was repeated.
        CollectiveError: A collective failed.

    """
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise ProbeError(f"probe(seconds={seconds!r}): seconds must be from {LEAST_SECONDS:g} to {MOST_SECONDS:g}.")
    group = dist.group.WORLD if process_group is None and dist.is_initialized() else process_group
    if group is None:
        raise ProbeError("probe: there is no process group; call torch.distributed.init_process_group first.")
    if group.size() == 1:
        raise ProbeError(
            "probe: a single rank has no link to measure; start two ranks or more, such as with 'torchrun "
            "--nproc-per-node 2'."
        )
    where = _device_of(group, device)
    clocks = Clocks() if where.type == "cpu" else Clocks(settle=torch.cuda.synchronize)
    if backend_of(group, where) == "nccl":
        carrier = ProcessGroupCommunicator(group)
        communicator: Communicator = wrap_communicator(carrier) if wrap_communicator else carrier
        return probe_over(
            communicator, seconds, 1, backend="nccl", link=link, device=where, clocks=clocks, unsteady=unsteady
        )
    address = Address.under(group, "probe")
    try:
        connection = open_connection(address, wrap_communicator)
        try:
            assert connection.communicator is not None, "it was just opened"
            machines = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            return probe_over(
                connection.communicator, seconds, machines, link=link, device=where, clocks=clocks, unsteady=unsteady
            )
        finally:
            connection.close(_CLOSING_SECONDS)
    finally:
        address.store_thread.close()


def probe_over(
    communicator: Communicator,
    seconds: float,
    ranks_per_host: int = 1,
    *,
    backend: str = "gloo",
    link: str = "",
    device: torch.device | None = None,
    clocks: Clocks | None = None,
    unsteady: bool = False,
) -> Probe:
    """Measure over a communicator; see `probe`. A measurement that contradicts itself is repeated once."""
    clocks = clocks or Clocks()
    begun = clocks.wall()
    ranks = communicator.world_size
    per_host = _agreed(communicator, ranks_per_host, device)
    groups: list[Group | None] = [None]
    if 1 < per_host < ranks and ranks % per_host == 0:
        groups += [Group("inner", per_host), Group("outer", per_host)]

    def measure_all() -> Probe:
        share = seconds / 2 / len(groups)
        levels = []
        for group in groups:
            started = clocks.wall()
            costs = _Meter(communicator, group, device, clocks).measure(share)
            took = clocks.wall() - started
            levels.append(Probe(ranks=ranks_in(group, ranks), costs=costs, took=took, backend=backend))
        whole, inner, outer = levels if len(levels) == 3 else (levels[0], None, None)
        return Probe(
            ranks=ranks,
            costs=whole.costs,
            took=clocks.wall() - begun,
            backend=backend,
            ranks_per_host=per_host,
            inner=inner,
            outer=outer,
            link=link,
            machine=f"{platform.system()} {platform.machine()}",
            versions={"python": platform.python_version(), "torch": torch.__version__},
        )

    found = measure_all()
    try:
        found.check()
    except ProbeError:
        found = measure_all()
        if not unsteady:
            found.check()
    return found


class _Meter:
    """Collectives of one group of ranks, timed."""

    def __init__(
        self, communicator: Communicator, group: Group | None, device: torch.device | None, clocks: Clocks
    ) -> None:
        self._communicator, self._group, self._device, self._clocks = communicator, group, device, clocks
        self._ranks = ranks_in(group, communicator.world_size)
        self._collectives: dict[tuple[str, int], Collective] = {}  # new memory would have to be mapped in first

    def measure(self, seconds: float) -> Mapping[str, Cost]:
        """Return what each kind costs, measured for so many seconds or less."""
        begun = self._clocks.wall()
        times = self._choose(seconds)
        mean = sum(times.values()) / len(times)
        # What takes little is measured more often: half of a turn is for that.
        repeated = [case for case, each in times.items() for _ in range(int(min(_MOST_REPEATED, max(1, mean / each))))]
        turn = sum(times[case] for case in repeated)
        left = seconds - (self._clocks.wall() - begun)
        found = self._turns(repeated, int(min(_MOST_TURNS, max(_LEAST_TURNS, left / turn))), begun + seconds)
        return {
            kind: Cost(tuple(Timing.of(case[1], *zip(*found[case], strict=True)) for case in times if case[0] == kind))
            for kind in MEASURED
        }

    def _choose(self, seconds: float) -> dict[Case, float]:
        """Return the kinds and sizes that can be measured often enough in so many seconds, with the seconds of each."""
        most = seconds / _GOOD_TURNS / 2
        found: dict[Case, float] = {}
        last = 0.0
        for payload in SIZES:
            is_enough = len(found) >= _LEAST_SIZES * len(MEASURED)
            too_large = payload * self._ranks > _MOST_BYTES or sum(found.values()) + 2 * last > most
            if is_enough and too_large:  # four times as large takes at least twice as long, on any but a short message
                break
            own = [(kind, payload) for kind in MEASURED]
            for case in own:
                self._time(*case)  # memory is allocated, and connections are made, the first time
            times = self._slowest([self._whole(*case) for case in own])[:, 0].tolist()
            last = sum(times)
            if is_enough and sum(found.values()) + last > most:
                break
            found |= dict(zip(own, times, strict=True))
        if sum(found.values()) > seconds / _LEAST_TURNS:
            raise ProbeError(
                f"the network is too slow for the time given: messages of {SIZES[_LEAST_SIZES - 1] / 1024:g} KiB took "
                f"{1e3 * last / len(MEASURED):.0f} ms each, with the meeting before it, and at least {_LEAST_TURNS} "
                f"turns are needed; probe for longer (seconds=, at most {MOST_SECONDS:g})."
            )
        return found

    def _turns(self, cases: list[Case], turns: int, deadline: float) -> Mapping[Case, list[tuple[float, float]]]:
        """Return what each case took, seconds and processor seconds, in the order of turns."""
        order: list[Case] = []
        own: list[tuple[float, float]] = []
        for turn in range(turns):
            shuffled = random.Random(turn).sample(cases, len(cases))
            order += shuffled
            own += [self._time(*case) for case in shuffled]
            is_late = self._clocks.wall() > deadline
            if self._meet(float(is_late)) and turn + 1 >= _LEAST_TURNS // 2:
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
        """Return a collective of so many bytes, or nearly: rows are alike."""
        dtype = torch.float16 if kind == HALF_SUM else torch.float32
        name = cast(CollectiveKind, plain_kind(kind))
        elements = payload // dtype.itemsize
        has_rows = kind in {"all-to-all", "reduce-scatter"}
        shape = (self._ranks, max(1, elements // self._ranks)) if has_rows else (elements,)
        return Collective(name, torch.zeros(shape, dtype=dtype, device=self._device), group=self._group)

    def _meet(self, number: float = 0.0) -> float:
        """Return when all ranks have come, with the sum of their numbers."""
        return _sum(self._communicator, number, self._device)

    def _slowest(self, times: list[tuple[float, float]]) -> Array:
        """Return, for each pair of this rank's times, the slowest rank's seconds and the mean processor seconds."""
        own = torch.tensor(times, dtype=torch.float64, device=self._device)
        pending = self._communicator.start(Collective("all-gather", own))
        pending.wait()
        every = pending.result.cpu().numpy()
        return np.stack([every[..., 0].max(axis=0), every[..., 1].mean(axis=0)], axis=-1)


def _sum(communicator: Communicator, number: float, device: torch.device | None) -> float:
    pending = communicator.start(Collective("all-reduce", torch.tensor([number], device=device)))
    pending.wait()
    return float(pending.result.item())


def _agreed(communicator: Communicator, ranks_per_host: int, device: torch.device | None) -> int:
    """Return how many ranks a machine has, if it is the same on all of them; otherwise 1: no hierarchy."""
    ranks = communicator.world_size
    total = _sum(communicator, ranks_per_host, device)
    squares = _sum(communicator, ranks_per_host**2, device)
    return ranks_per_host if ranks * squares == total**2 else 1


def _device_of(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if backend_of(group, torch.device("cuda")) == "nccl" else "cpu")
