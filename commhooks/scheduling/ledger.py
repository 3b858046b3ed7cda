"""A channel's statistics: bytes, collectives, seconds."""

from __future__ import annotations

import dataclasses
import operator
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

from commhooks.communicators.collective import KindTraffic, Traffic
from commhooks.devices import runs_later
from commhooks.language.requests import Layout
from commhooks.scheduling.task import BucketTask
from commhooks.tensors import tensor_bytes, tensor_elements
from commhooks.units import bytes_in_words, counted, in_columns, seconds_in_words

Counts = TypeVar("Counts", "Statistics", "KindTraffic")

_LAYOUTS_TO_KEEP = 1000
"""The number of layouts above which shares are divided immediately, so that a bucket whose memory moves in every step
does not fill the ledger."""


@dataclasses.dataclass
class Statistics:
    """Counts since attaching, or for one step. Bytes are this rank's; seconds are the host's wall-clock time.

    A GPU runs later than the host: see `buckets_on_gpu`.
    """

    steps: int = 0
    buckets: int = 0
    buckets_on_gpu: int = 0
    """The number of buckets in a GPU's memory. For them `seconds_compressing`, and on NCCL all `seconds_*`, end when
    the host has queued the work, not when the device has done it; to time the device, use a profiler."""
    collectives: int = 0
    gradient_elements: int = 0
    gradient_bytes: int = 0
    """The size of the gradients before compression."""
    payload_elements: int = 0
    payload_bytes: int = 0
    """Bytes that this rank passed to collectives."""
    moved_bytes: int = 0
    """Bytes sent per rank for this payload, as a ring or an all-to-all moves it."""
    seconds_compressing: float = 0.0
    seconds_waiting: float = 0.0
    """Seconds that the scheduler waited for collectives."""
    seconds_exposed: float = 0.0
    """Seconds from the submission of each step's last bucket to the completion of its future: the time that the
    backward pass could not hide."""
    by_kind: dict[str, KindTraffic] = dataclasses.field(default_factory=dict)
    by_group: dict[str, KindTraffic] = dataclasses.field(default_factory=dict)
    """The traffic among some of the ranks: "inner" inside machines, "outer" between them; see `Hierarchical`."""
    not_compressed_bytes: int = 0
    """The size of the gradients that FSDP2 reduced itself in these steps; `Handle.not_compressed` lists them."""

    @property
    def ratio(self) -> float:
        """Gradient bytes divided by payload bytes (0.0 before any was sent). Higher: smaller messages."""
        return self.gradient_bytes / self.payload_bytes if self.payload_bytes else 0.0

    def __str__(self) -> str:
        """Return a short table: totals, and averages per step."""
        smaller = f"{self.ratio:.1f} times smaller" if self.ratio else ""
        rows = [
            ("gradients", bytes_in_words(self.gradient_bytes), self._a_step(self.gradient_bytes)),
            ("in messages", bytes_in_words(self.payload_bytes), smaller),
            ("sent by this rank", bytes_in_words(self.moved_bytes), self._a_step(self.moved_bytes)),
        ]
        if self.not_compressed_bytes:
            size = self.not_compressed_bytes
            rows.insert(1, ("not compressed", bytes_in_words(size), self._a_step(size)))
        for kind, traffic in (self.by_kind | self.by_group).items():
            rows.append((f"  {kind}", bytes_in_words(traffic.moved_bytes), counted(traffic.collectives, "collective")))
        for what, seconds in (
            ("compressing", self.seconds_compressing),
            ("waiting for collectives", self.seconds_waiting),
            ("not hidden behind backward", self.seconds_exposed),
        ):
            a_step = f"{seconds_in_words(seconds / self.steps)} a step" if self.steps else ""
            rows.append((what, seconds_in_words(seconds), a_step))
        counts = counted(self.steps, "step"), counted(self.buckets, "bucket"), counted(self.collectives, "collective")
        return ", ".join(counts) + "\n" + in_columns(rows)

    def _a_step(self, count: int) -> str:
        return f"{bytes_in_words(count / self.steps)} a step" if self.steps else ""

    def take(self, traffic: Traffic) -> None:
        """Set the counts of messages to a communicator's."""
        self.collectives = traffic.collectives
        self.payload_elements = traffic.payload_elements
        self.payload_bytes = traffic.payload_bytes
        self.moved_bytes = traffic.moved_bytes
        self.seconds_waiting = traffic.seconds_waiting
        # Of copies, made in one step: a connection's thread may add a kind meanwhile.
        self.by_kind = {kind: _copy(counts) for kind, counts in dict(traffic.by_kind).items()}
        if traffic.by_group:
            self.by_group = {kind: _copy(counts) for kind, counts in dict(traffic.by_group).items()}

    def since(self, earlier: Statistics) -> Statistics:
        """Return the counts added since `earlier` was copied."""
        difference = _subtract(self, earlier)
        for kind, traffic in self.by_kind.items():
            difference.by_kind[kind] = _subtract(traffic, earlier.by_kind.get(kind, KindTraffic()))
        for kind, traffic in self.by_group.items():
            difference.by_group[kind] = _subtract(traffic, earlier.by_group.get(kind, KindTraffic()))
        return difference


def total(of_channels: Iterable[Statistics]) -> Statistics:
    """Return the sums of several channels' counts."""
    added = Statistics()
    for one in of_channels:
        _add(added, one)
        for sums, kinds in ((added.by_kind, one.by_kind), (added.by_group, one.by_group)):
            for kind, traffic in kinds.items():
                _add(sums.setdefault(kind, KindTraffic()), traffic)
    return added


@dataclasses.dataclass
class ParameterTraffic:
    """One parameter's share of the counts. Seconds are not split: a bucket's parameters are processed together."""

    steps: int = 0
    """The number of times that its gradient was handed in."""
    collectives: int = 0
    """The number of collectives that carried part of it."""
    gradient_bytes: int = 0
    payload_bytes: int = 0
    """Its share of the messages; if a message does not say whose it is, by the parameter's elements in the bucket."""
    moved_bytes: int = 0
    """Bytes sent per rank for that share."""

    @property
    def ratio(self) -> float:
        """Gradient bytes over payload bytes (0.0 before any was sent)."""
        return self.gradient_bytes / self.payload_bytes if self.payload_bytes else 0.0

    def __str__(self) -> str:
        return (
            f"{counted(self.steps, 'step')}, {counted(self.collectives, 'collective')}: "
            f"{bytes_in_words(self.gradient_bytes)} of gradients, {bytes_in_words(self.payload_bytes)} in messages, "
            f"{bytes_in_words(self.moved_bytes)} sent by this rank"
        )


Shares = tuple[tuple[Layout, ...], tuple[int, ...]]
"""The layouts of a request's parts, and the weight of each part."""


class _Shares:
    """Shares of bytes, by parameter: recorded by layout, which is cheap, and divided on demand."""

    def __init__(self) -> None:
        self._noted: dict[Shares, list[int]] = {}
        self._divided: dict[str, defaultdict[str, float]] = {}
        self._lock = threading.Lock()

    def note(self, noted: Iterable[tuple[Shares, Sequence[int]]]) -> None:
        """Add counts, in the order of `ParameterTraffic`'s fields, to earlier ones of the same layouts."""
        with self._lock:
            for shares, counts in noted:
                known = self._noted.get(shares)
                self._noted[shares] = list(counts) if known is None else list(map(operator.add, known, counts))
            if len(self._noted) > _LAYOUTS_TO_KEEP:
                self._divide()

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each parameter's traffic: whole counts of steps and collectives, shares of bytes."""
        with self._lock:
            self._divide()
            rounded = {
                key: {name: round(count) for name, count in counts.items()} for key, counts in self._divided.items()
            }
        return {key: ParameterTraffic(**counts) for key, counts in rounded.items()}

    def _divide(self) -> None:
        for (layouts, weights), counts in self._noted.items():
            total, of_keys = sum(weights), defaultdict[str, float](float)
            for layout, weight in zip(layouts, weights, strict=True):
                unit = weight / total / layout.elements if total and layout.elements else 0.0
                for key, size in zip(layout.keys, layout.sizes, strict=True):
                    of_keys[key] += size * unit
            for key, share in of_keys.items():
                mine = self._divided.setdefault(key, defaultdict(float))
                for field, count in zip(dataclasses.fields(ParameterTraffic), counts, strict=True):
                    mine[field.name] += count if field.name in ("steps", "collectives") else count * share
        self._noted.clear()


class Ledger:
    """The counts of one channel: totals, the last complete step, and each parameter's share."""

    def __init__(self) -> None:
        self._shares = _Shares()
        self._totals = Statistics()
        self._ends = Statistics(), Statistics()
        """The totals at the end of the last complete step, and of the one before."""

    def enter(self, task: BucketTask, traffic: Traffic) -> None:
        """Record a finished task, of one bucket or several."""
        totals = self._totals
        totals.seconds_compressing += task.seconds_compressing
        noted: list[tuple[Shares, Sequence[int]]] = [
            ((request.layouts, request.part_bytes), (0, 1, 0, request.payload_bytes, request.moved_bytes))
            for request in task.asked
        ]
        for member in task.bucket.members:
            totals.buckets += 1
            totals.buckets_on_gpu += int(runs_later(member.memory))
            totals.gradient_elements += tensor_elements(member.memory)
            gradient_bytes = tensor_bytes(member.memory)
            totals.gradient_bytes += gradient_bytes
            noted.append((((member.layout,), (1,)), (1, 0, gradient_bytes, 0, 0)))
        self._shares.note(noted)
        if task.is_last:
            totals.steps += 1
            totals.seconds_exposed += time.perf_counter() - task.submitted
            totals.take(traffic)
            self._ends = _copy(totals), self._ends[0]

    def totals(self, traffic: Traffic | None) -> Statistics:
        """Return a copy of the totals since attaching."""
        totals = _copy(self._totals)
        if traffic is not None:
            totals.take(traffic)
        return totals

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each parameter's share of all finished buckets, by name."""
        return self._shares.by_parameter()

    def last_step(self) -> Statistics:
        """Return the counts of the last complete step."""
        last, before = self._ends
        return last.since(before)


def _copy(counts: Counts) -> Counts:
    """Return a copy; `copy.copy` and `dataclasses.replace` take several times as long, and this runs in every step.

    Copies share the counts of kinds and groups, which `Statistics.take` replaces.
    """
    same = object.__new__(type(counts))
    vars(same).update(vars(counts))
    return same


def _add(sums: Counts, counts: Counts) -> None:
    for field in dataclasses.fields(counts):
        value = getattr(counts, field.name)
        if not isinstance(value, dict):
            setattr(sums, field.name, getattr(sums, field.name) + value)


def _subtract(later: Counts, earlier: Counts) -> Counts:
    numbers = {}
    for field in dataclasses.fields(later):
        value = getattr(later, field.name)
        if not isinstance(value, dict):
            numbers[field.name] = value - getattr(earlier, field.name)
    return type(later)(**numbers)
