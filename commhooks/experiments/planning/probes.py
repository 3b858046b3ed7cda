"""A probe's results: the time of each collective over a network, as a function of its bytes.

For each kind, least squares fits a line to the medians of all sizes, weighted so that relative errors count:

    seconds           = latency + seconds_per_byte · payload
    processor seconds = the same form, with its own coefficients

If a median of the seconds lies further than `MOST_RESIDUAL` from the line (small messages are cheaper than large ones,
buffers fill), the line is not used: time is interpolated between measured sizes. Nothing is predicted beyond `REACH`
times the largest size sent, as short messages may fit into a link's buffers and bursts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from commhooks.communicators.collective import KINDS, ring_bytes
from commhooks.errors import SettingsError
from commhooks.experiments import stored
from commhooks.experiments.planning.errors import ProbeError
from commhooks.experiments.planning.profiles import Seconds
from commhooks.experiments.timing.link import HALF_SUM, Transfer, plain_kind

FORMAT = 1
MEASURED = (*KINDS, HALF_SUM)
MOST_RESIDUAL = 0.1
MOST_DISAGREEMENT = 0.1
"""The largest difference between the two halves of a probe, relative to the smaller, for each kind at each size of
`COMPARED_AT`. A probe whose halves differ by more is repeated. If they still do, its predictions are as much less
certain."""
REACH = 4
"""The largest payload that is predicted, in multiples of the largest size sent."""
COMPARED_AT = (64 * 1024, 4 * 1024 * 1024)


class Line(NamedTuple):
    """Seconds as a function of bytes."""

    at_zero: float
    per_byte: float

    def at(self, payload: float) -> float:
        """Return the seconds for a payload."""
        return self.at_zero + self.per_byte * payload


@dataclasses.dataclass(frozen=True)
class Timing:
    """A collective of one size. Its seconds are the slowest rank's, its processor seconds the ranks' mean."""

    payload: int
    """Bytes each rank contributes."""
    seconds: Seconds
    halves: tuple[tuple[float, float], ...]
    """The medians of the first and of the second half of the measurements, and of every other one."""
    processor_seconds: float
    """All threads of the process together."""
    times: int
    """The number of measurements."""

    @classmethod
    def of(cls, payload: int, seconds: Sequence[float], processor_seconds: Sequence[float]) -> Timing:
        """Return the timing of two measurements or more, in their order."""
        low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
        middle = len(seconds) // 2
        splits = (seconds[:middle], seconds[middle:]), (seconds[::2], seconds[1::2])
        halves = tuple((float(np.median(first)), float(np.median(second))) for first, second in splits)
        processor = float(np.median(processor_seconds))
        return cls(payload, Seconds(median, low, high), halves, processor, times=len(seconds))


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one kind of collective, for any size."""

    timings: tuple[Timing, ...]
    """The timings of at least two sizes, by ascending payload."""

    def __post_init__(self) -> None:
        payloads = [timing.payload for timing in self.timings]
        if len(payloads) < 2 or any(low >= high for low, high in itertools.pairwise(payloads)):
            raise ProbeError(f"a collective must be measured with two sizes or more, in ascending order: {payloads}")

    @functools.cached_property
    def line(self) -> Line:
        """Latency and seconds per byte; the best line, even if it does not fit well."""
        return _fit(self._payloads, self._medians)

    @functools.cached_property
    def processor_line(self) -> Line:
        """Processor seconds of a collective, and for each byte."""
        return _fit(self._payloads, [timing.processor_seconds for timing in self.timings])

    @functools.cached_property
    def residual(self) -> float:
        """The largest distance of a median from the line, relative to the median."""
        return max(
            abs(self.line.at(payload) / median - 1)
            for payload, median in zip(self._payloads, self._medians, strict=True)
        )

    @functools.cached_property
    def is_line(self) -> bool:
        """True if the line fits; otherwise seconds are interpolated."""
        return self.residual <= MOST_RESIDUAL

    @property
    def largest(self) -> int:
        """The bytes of the largest payload that was sent."""
        return self.timings[-1].payload

    def seconds(self, payload: float) -> float:
        """Return the seconds for a payload."""
        return self.line.at(payload) if self.is_line else self._between(payload, self._medians)

    def processor_seconds(self, payload: float) -> float:
        """Return the processor seconds for a payload."""
        return self.processor_line.at(payload)

    def halves(self, payload: float) -> list[tuple[float, float]]:
        """Return the seconds for a payload according to each half alone, for each way to divide the measurements."""
        found = []
        for split in zip(*(timing.halves for timing in self.timings), strict=True):
            first, second = zip(*split, strict=True)
            found.append((self._by(first, payload), self._by(second, payload)))
        return found

    def spread(self) -> float:
        """Return the relative uncertainty of a prediction, from the fit, the quartiles and the halves' difference.

        A median of n is known to about 1.25 · 0.74 · (quartile range) / √n.
        """
        noise = [
            0.93 * (one.seconds.high - one.seconds.low) / one.seconds.median / one.times**0.5 for one in self.timings
        ]
        unsteady = self.disagreement if self.disagreement > MOST_DISAGREEMENT else 0.0
        return math.hypot(self.residual if self.is_line else 0.0, float(np.median(noise)), unsteady)

    @functools.cached_property
    def disagreement(self) -> float:
        """The largest difference between two halves of the measurement, relative to the smaller, at `COMPARED_AT`."""
        halves = [pair for size in self.compared_at for pair in self.halves(size)]
        return max((max(pair) / min(pair) - 1 for pair in halves), default=0.0)

    @property
    def compared_at(self) -> tuple[int, ...]:
        """The sizes at which halves are compared: not beyond the largest that was measured."""
        return tuple(min(payload, self.largest) for payload in COMPARED_AT)

    @functools.cached_property
    def _payloads(self) -> list[int]:
        return [timing.payload for timing in self.timings]

    @functools.cached_property
    def _medians(self) -> list[float]:
        return [timing.seconds.median for timing in self.timings]

    def _by(self, medians: Sequence[float], payload: float) -> float:
        """Return the seconds for a payload according to other medians."""
        return _fit(self._payloads, medians).at(payload) if self.is_line else self._between(payload, medians)

    def _between(self, payload: float, medians: Sequence[float]) -> float:
        """Return the seconds for a payload between two sizes that were measured, or beyond them."""
        payloads, rising = self._payloads, np.maximum.accumulate(medians)
        if payload <= payloads[-1]:
            return float(np.interp(payload, payloads, rising))
        slope = (rising[-1] - rising[-2]) / (payloads[-1] - payloads[-2])
        return float(rising[-1] + slope * (payload - payloads[-1]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """Collectives measured between ranks: a `Network` for the step-time model, for this number of ranks."""

    ranks: int
    costs: Mapping[str, Cost]
    """The cost of each kind of collective, one of `MEASURED`."""
    took: float
    """Seconds of measuring."""
    backend: str = "gloo"
    link: str = ""
    """The link's name, as the user gave it."""
    hosts: tuple[str, ...] = ()
    """The network name of each rank's host; empty: written by a version that did not record them."""
    machine: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
        """Return the seconds and bytes of a collective with a payload of this many bytes per rank.

        Raises:
            SettingsError: The kind, or this number of ranks, was not measured.
            ProbeError: The payload is more than `REACH` times the largest size sent.

        """
        if ranks == 1:
            return Transfer(0.0, 0.0, 0)
        if ranks != self.ranks:
            raise SettingsError(
                f"Probe.transfer(ranks={ranks}): it was measured with {self.ranks} ranks, and is valid for those only; "
                "probe with as many ranks as you train with, or compute with commhooks.experiments.timing.link.Link."
            )
        cost = self._cost(kind)
        if not self.reaches({kind: payload}):
            raise ProbeError(
                f"Probe.transfer(payload={payload}): the largest {kind} that was sent had {cost.largest:,} bytes, and "
                f"beyond {REACH} times that nothing is predicted; probe for longer (seconds=), or with a profile "
                "(profile=)."
            )
        seconds = cost.seconds(payload)
        processor = min(seconds, cost.processor_seconds(payload))
        return Transfer(seconds, processor, ring_bytes(plain_kind(kind), payload, ranks))

    def reaches(self, payloads: Mapping[str, int]) -> bool:
        """Return whether none of the payloads, by kind, is more than `REACH` times the largest that was sent."""
        return all(payload <= REACH * self.costs[kind].largest for kind, payload in payloads.items())

    def spread(self, kind: str) -> float:
        """Return the relative uncertainty of the time of collectives of a kind."""
        return self._cost(kind).spread()

    @property
    def disagreement(self) -> float:
        """The largest difference between two halves of the measurement, over all kinds."""
        return max(cost.disagreement for cost in self.costs.values())

    def _cost(self, kind: str) -> Cost:
        if kind not in self.costs:
            raise SettingsError(
                f"collectives of kind {kind!r} were not probed, but {', '.join(self.costs)}; probe with the profile "
                "whose hooks send them (profile=, --profile)."
            )
        return self.costs[kind]

    def write(self, path: Path) -> None:
        """Write the probe into a JSON file; an existing one is replaced at once, or stays as it is."""
        stored.write(self, path, form=FORMAT)

    @classmethod
    def read(cls, path: Path) -> Probe:
        """Return the probe in a file.

        Raises:
            ProbeError: There is no such file, or it does not hold a probe of this format.

        """
        try:
            return stored.read(cls, path, form=FORMAT)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ProbeError(
                f"probe {path}: expected a file of format {FORMAT} that 'commhooks probe --json' wrote "
                f"({type(error).__name__}: {error}); probe again."
            ) from error


def _fit(payloads: Sequence[float], seconds: Sequence[float]) -> Line:
    """Return the line with the least squares of relative errors; neither coefficient is negative."""
    weights = 1 / np.maximum(seconds, 1e-9)
    scale = max(payloads)
    columns = np.stack([np.ones(len(payloads)), np.asarray(payloads) / scale], axis=1)
    (at_zero, per_scale), _ = nnls(columns * weights[:, None], np.asarray(seconds) * weights)
    return Line(float(at_zero), float(per_scale / scale))
