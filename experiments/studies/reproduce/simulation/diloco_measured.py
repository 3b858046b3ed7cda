"""DiLoCo's measured utilisation on four GPUs with limited links beside the step-time model over whole rounds.

Nothing is timed and nothing is fitted: the model is given the parameters, the compute of a step, the number of workers,
the rate, and that all parameters travel in fp32 by a ring, once in H steps, while nothing is computed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commhooks.experiments.links.link import format_rate
from commhooks.experiments.report.words import percent
from commhooks.experiments.timing.link import Link
from commhooks.experiments.timing.rounds import Rounds, round_time
from commhooks.experiments.timing.step_time import Bucket, Stage
from experiments.studies.blocks import Block, Table
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction

_THEIRS: Mapping[tuple[float, int], float] = {
    (200e6, 1): 0.0032,
    (200e6, 8): 0.0248,
    (200e6, 32): 0.1001,
    (200e6, 128): 0.3609,
    (1e9, 1): 0.0174,
    (1e9, 8): 0.1235,
    (1e9, 32): 0.3601,
    (1e9, 128): 0.7152,
}
"""Utilisation by rate, in bits per second, and H."""
_GOAL = 0.05  # median relative error


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The figures that the source states."""

    parameters: int = 30_846_720
    step_seconds: float = 0.027
    workers: int = 4
    bytes_per_parameter: int = 4


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return our utilisation at each of their points, in their order."""
    payload = settings.parameters * settings.bytes_per_parameter
    exchange = [Bucket(0.0, (Stage(0.0, (("all-reduce", payload),)),))]
    found = []
    for rate, every in _THEIRS:
        link = Link(rate=rate, algorithm="ring")
        found.append(round_time(Rounds(every=every), exchange, settings.step_seconds, link, settings.workers))
    return {"utilisation": [one.utilisation for one in found]}


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return theirs beside ours."""
    rows, errors = [], []
    for ((rate, every), theirs), ours in zip(_THEIRS.items(), measured["utilisation"], strict=True):
        errors.append(ours / theirs - 1)
        rows.append([format_rate(rate), str(every), f"{theirs:.2%}", f"{ours:.2%}", f"{errors[-1]:+.1%}"])
    middle = statistics.median(map(abs, errors))
    return [
        Table(
            "Utilisation: the part of a step in which a worker computes", ["rate", "H", "theirs", "ours", "off"], rows
        ),
        f"The median relative error is {percent(middle)}, {'within' if middle <= _GOAL else 'outside'} the "
        f"{percent(_GOAL)} that were the goal; the largest is {percent(max(map(abs, errors)))}.",
    ]


REPRODUCTION = Reproduction(
    name="diloco-measured",
    title="How much of the time DiLoCo computes",
    source="diloco-measured: DiLoCo on 4 NVIDIA L40S whose links `tc tbf` limits, median of 3 runs",
    said=(
        "A model of 30,846,720 parameters computes 27 ms a step on each of 4 workers. With an exchange every 1, 8, 32 "
        "and 128 steps, workers compute 0.32, 2.48, 10.01 and 36.09 % of the time at 200 Mbit/s, and 1.74, 12.35, "
        "36.01 and 71.52 % at 1 Gbit/s.",
    ),
    sizes={"default": Settings(), "tiny": Settings()},
    measure=measure,
    show=show,
)
