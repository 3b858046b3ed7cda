"""The cost of compression in a step, measured once, in units that carry over to other machines.

Costs that grow with the data are given in copies: a cost of 3 means that a rank spends as long on an element as on
copying it three times. `copy_seconds` times a copy on this machine. Costs that do not grow with the data (handing a
bucket to the worker thread, a round trip through Gloo) are in seconds.

A parameter's cost is interpolated between matrices of several sizes, because a small matrix costs more per element than
a large one. All costs were measured in real steps of two ranks, by `experiments/studies/measured_costs.py`. The package
comes with `costs.json`, beside this file.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from commhooks.experiments import stored
from commhooks.experiments.timing.link import Link

Shape = tuple[int, ...]
FILE = Path(__file__).with_name("costs.json")
FORMAT = 1  # of the file; increased when readers must change
COPIED_ELEMENTS = 1 << 22  # of fp32: 16 MiB, more than the caches nearest to a core
_SECONDS_OF_COPYING = 0.1
_LEAST_COPIES = 5


@dataclasses.dataclass(frozen=True)
class Sample:
    """A parameter of some size, and what it costs a rank."""

    elements: int
    rounds: tuple[float, ...]
    """The compression before each round and after the last one, in copies of one element."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookCosts:
    """One hook's cost on two ranks."""

    compressor: str
    """Its `str`, from which `commhooks.make_compressor` builds it."""
    bucket_seconds: float
    """Seconds for each bucket, whatever its size."""
    matrices: tuple[Sample, ...]
    """The samples of square matrices, from the smallest to the largest."""
    vector: Sample
    """The sample of a parameter with one dimension."""
    copies_per_byte: float
    """The CPU time to send and add one byte through Gloo, in units of one byte's copy. Gloo adds half precision more
    slowly than fp32."""
    growth: tuple[float, ...]
    """The fraction by which each rank beyond two increases the cost before each round and after the last one."""

    def __post_init__(self) -> None:
        sizes = [sample.elements for sample in self.matrices]
        if len(sizes) < 2 or sizes != sorted(set(sizes)):
            raise ValueError(f"matrices must be at least two, from the smallest on (got {sizes})")
        for sample in (*self.matrices, self.vector):
            rounds, costs = len(self.growth), sample.rounds
            if len(costs) != rounds or sample.elements < 1 or not all(0 <= cost < math.inf for cost in costs):
                raise ValueError(f"a sample must have {rounds} costs of at least 0 (got {sample})")

    def seconds(self, shapes: Sequence[Shape], ranks: int, copy: float, rounds: int) -> tuple[float, ...]:
        """Return the seconds of compression before each round of a bucket and after the last one.

        Args:
            shapes: The shapes of the bucket's parameters.
            ranks: The number of ranks.
            copy: Seconds to copy one fp32 element.
            rounds: The number of the bucket's rounds. If a matrix would take more, the costs of its other rounds come
                after the last.

        """
        copies = np.zeros(len(self.growth))
        for shape, count in Counter(shapes).items():
            copies += count * self._parameter(shape)
        copies *= 1 + np.array(self.growth) * max(0, ranks - 2)
        each = copy * copies + self.bucket_seconds / len(copies)
        return (*each[:rounds].tolist(), *[0.0] * (rounds - len(each)), float(each[rounds:].sum()))

    def _parameter(self, shape: Shape) -> npt.NDArray[np.float64]:
        """Return a parameter's cost before each round and after the last one, in copies of an element."""
        elements = math.prod(shape)
        samples = self.matrices
        if len(shape) < 2:  # beyond its own size it grows like a large matrix
            last = samples[-1]
            grown = np.array(last.rounds) / last.elements * max(0, elements - self.vector.elements)
            return np.array(self.vector.rounds) + grown
        if elements >= samples[-1].elements:
            return np.array(samples[-1].rounds) * elements / samples[-1].elements
        low, high = next(pair for pair in itertools.pairwise(samples) if elements <= pair[1].elements)
        share = (elements - low.elements) / (high.elements - low.elements)
        return np.maximum((1 - share) * np.array(low.rounds) + share * np.array(high.rounds), 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of all hooks that were measured, and of Gloo."""

    hooks: Mapping[str, HookCosts]
    """The costs of each hook, by name with settings, such as 'powersgd:rank=4'."""
    hop_seconds: float
    """Seconds that Gloo takes to send a few bytes between idle ranks, on a network without latency."""
    round_seconds: float
    """Seconds that a round also adds if ranks are busy: its threads wait for one another on a core that computes."""
    copy_rate: float
    """Bytes per second that the machine copied on which this was measured."""
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    level: str | None = None
    """The compiled passes that were in use, as named by `commhooks.native.compiled()`; None: everything ran eagerly."""

    def of(self, compressor: str) -> HookCosts | None:
        """Return the costs of a compressor, given its `str`; None: they were not measured."""
        return next((one for one in self.hooks.values() if one.compressor == compressor), None)

    def on_gloo(self, link: Link, copy: float) -> Link:
        """Return a link with what Gloo adds to it on a processor that copies an element of fp32 in `copy` seconds."""
        return dataclasses.replace(
            link,
            latency=link.latency + self.hop_seconds,
            seconds_per_byte=self.hooks["all-reduce"].copies_per_byte * copy / 4,
            seconds_per_half_byte=self.hooks["fp16"].copies_per_byte * copy / 4,
            seconds_per_round=self.round_seconds,
        )

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        stored.write(self, path, form=FORMAT)

    @classmethod
    def read(cls, path: Path = FILE) -> Costs:
        """Return the costs in a file; by default in the one that comes with this package.

        Raises:
            ValueError: There is no such file, or it does not hold costs of this format.

        """
        return stored.read_of(cls, path, form=FORMAT, what="costs", by="the calibration of costs")


def gloo_link(rate: float, latency: float) -> Link:
    """Return a link of a rate (bits per second) and a latency (seconds), with what Gloo adds to it on this machine."""
    return Costs.read().on_gloo(Link(rate=rate, latency=latency), copy_seconds())


def copy_seconds() -> float:
    """Return the seconds in which one thread here copies an element of fp32; it takes 0.1 s.

    It is the lower quartile of many copies, by the processor's clock: other work on this machine can only slow them
    down.
    """
    source, target = np.ones(COPIED_ELEMENTS, np.float32), np.zeros(COPIED_ELEMENTS, np.float32)
    found: list[float] = []
    ends = time.perf_counter() + _SECONDS_OF_COPYING
    while time.perf_counter() < ends or len(found) < _LEAST_COPIES:
        begun = time.thread_time()
        np.copyto(target, source)
        found.append(time.thread_time() - begun)
    return float(np.quantile(found, 0.25)) / COPIED_ELEMENTS
