"""Streaming DiLoCo's table 4 beside the step-time model: which bandwidth keeps a cluster computing.

Nothing is timed: the model of `commhooks plan` computes everything from the model's size, the time of a step and
what is sent. Two replicas each have a link of the stated bandwidth in both directions, and average by a ring
all-reduce, data alone. Gradients (or, once in H steps, what the outer optimizer needs) become ready during the backward
pass, the last two thirds of a step, and are sent in 24 parts, one for each layer, while it goes on. An author of the
table says on his simulator's page that reductions overlap with the backward pass; the bytes for a parameter and the
number of replicas are not in the table: ours were chosen with it in view, and other choices are shown beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commhooks.experiments.report.words import percent
from commhooks.experiments.timing.link import Link
from commhooks.experiments.timing.step_time import Bucket, Stage, Step, step_time
from commhooks.units import three_digits
from experiments.studies.blocks import Block, Table
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction

_TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
_THEIRS = {"data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0), "DiLoCo, H = 100": (1.4, 6.2, 13.3, 23.3, 86.8)}
_PERIODS = {"data-parallel": 1, "DiLoCo, H = 100": 100}
_POINTS_ALLOWED = 4.0  # of utilisation, in the row of DiLoCo
_BACKWARD_SHARE = 2 / 3  # of a step's compute


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The assumptions."""

    parameters: int = 1_000_000_000
    step_seconds: float = 0.1
    bytes_per_parameter: int = 2  # bfloat16
    replicas: int = 2
    parts: int = 24  # layers, each sent when its gradients are ready
    overlap: bool = True


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return utilisation at their bandwidths and the bandwidth for their utilisations, for ours and other choices."""
    return {name: _rows(changed) for name, changed in _variants(settings).items()}


def _variants(settings: Settings) -> dict[str, Settings]:
    """Return the settings, and others that differ in one assumption each."""
    return {
        "ours": settings,
        "without overlap": dataclasses.replace(settings, overlap=False),
        "4 bytes a parameter": dataclasses.replace(settings, bytes_per_parameter=4),
        "8 replicas": dataclasses.replace(settings, replicas=8),
    }


def _rows(settings: Settings) -> dict[str, Any]:
    return {
        method: {
            "utilisation": [utilisation(settings, period, 1e9 * rate) for rate in _THEIRS[method]],
            "gbits": [needed(settings, period, target) / 1e9 for target in _TARGETS],
        }
        for method, period in _PERIODS.items()
    }


def utilisation(settings: Settings, period: int, rate: float) -> float:
    """Return the compute utilisation if all parameters are averaged once in `period` steps, at this rate."""
    compute = period * settings.step_seconds
    backward = _BACKWARD_SHARE * settings.step_seconds  # of the period's last step
    payload = settings.parameters * settings.bytes_per_parameter // settings.parts
    buckets = []
    for part in range(1, settings.parts + 1):
        ready = compute - backward * (1 - part / settings.parts) if settings.overlap else compute
        buckets.append(Bucket(ready, (Stage(0.0, (("all-reduce", payload),)),)))
    step = Step(compute=compute, buckets=tuple(buckets))
    return step_time(step, Link(rate=rate, algorithm="ring"), settings.replicas).utilisation


def needed(settings: Settings, period: int, target: float) -> float:
    """Return the least rate that reaches a utilisation, in bits per second, to a thousandth."""
    low, high = 1e6, 1e15
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        if utilisation(settings, period, middle) < target:
            low = middle
        else:
            high = middle
    return high


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return theirs beside ours, and what other assumptions would give."""
    columns = ["", *(f"{100 * target:.0f} %" for target in _TARGETS)]
    bandwidths, reached, others = [], [], []
    for method, theirs in _THEIRS.items():
        bandwidths.append([f"{method}, theirs", *(f"{rate:g}" for rate in theirs)])
        bandwidths.append([f"{method}, ours", *map(three_digits, measured["ours"][method]["gbits"])])
        reached.append([method, *map(percent, measured["ours"][method]["utilisation"])])
        for name, rows in measured.items():
            found = (_points(rows, method, place) for place in range(len(_TARGETS)))
            others.append([f"{method}, {name}", *(f"{points:+.1f}" for points in found)])
    return [
        Table("Gbit/s needed for a compute utilisation", columns, bandwidths),
        Table("Our utilisation at their bandwidth for a utilisation", columns, reached),
        _verdict(measured),
        Table("Points of utilisation by which the model differs, under other assumptions", columns, others),
    ]


def _points(rows: Mapping[str, Any], method: str, place: int) -> float:
    return 100 * float(rows[method]["utilisation"][place] - _TARGETS[place])


def _verdict(measured: Mapping[str, Any]) -> str:
    worst = {
        method: max((_points(measured["ours"], method, place) for place in range(len(_TARGETS))), key=abs)
        for method in _THEIRS
    }
    h100, parallel = worst["DiLoCo, H = 100"], worst["data-parallel"]
    inside = "within" if abs(h100) <= _POINTS_ALLOWED else "outside"
    return (
        f"For H = 100 our utilisation at their bandwidths differs by at most {abs(h100):.1f} points, {inside} the "
        f"{_POINTS_ALLOWED:g} that were the goal. For data-parallel training the largest difference is {parallel:+.1f} "
        "points."
    )


REPRODUCTION = Reproduction(
    name="diloco-table-4",
    title="Which bandwidth keeps a cluster computing",
    source="Streaming DiLoCo with overlapping communication (Douillard et al., 2025), table 4",
    said=(
        "A model of 1 billion parameters that computes 0.1 s a step needs these Gbit/s between replicas for a compute "
        "utilisation of 50, 80, 90, 95 and 99 %: 86.8, 152.6, 184.2, 222.3 and 569 for data-parallel training; 1.4, "
        "6.2, 13.3, 23.3 and 86.8 for DiLoCo with one exchange every 100 steps.",
        "The reduction of gradients, or of outer gradients, overlaps with the backward pass (the first author's "
        "bandwidth simulator on the web).",
    ),
    sizes={"default": Settings(), "tiny": Settings(parts=6)},
    measure=measure,
    show=show,
)
