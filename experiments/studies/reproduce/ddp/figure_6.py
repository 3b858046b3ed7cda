"""The parts of an iteration's time, with and without overlap of communication and the backward pass.

The same models in the same buckets take turns. In both cases a communication hook all-reduces every bucket: with
overlap as soon as the bucket is ready, without it only when the last bucket is, one right after another. Copying
gradients into buckets is part of the backward pass, and copying them back is part of the exposed communication.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from commhooks.experiments.report.plots import Theme, canvas
from commhooks.units import three_digits
from experiments.studies.blocks import Block, Picture, Table
from experiments.studies.medians import Ratio, milliseconds
from experiments.studies.reproduce.ddp.hooks import do_not_overlap, overlap
from experiments.studies.reproduce.ddp.turns import (
    DDPS,
    MODELS,
    PARTS,
    TINY_MODELS,
    Entrant,
    link_of,
    take_turns,
    whole,
)
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction

_WAYS = {"with": overlap, "without": do_not_overlap}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the measurement."""

    kind: str = "hosts"
    rate: str = "1 Gbit/s"
    ranks: int = 2
    models: Mapping[str, str] = field(default_factory=lambda: dict(MODELS))
    bucket_mib: float = 5.0  # lower: communication begins earlier, in more messages
    turns: int = 15


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return every model's turns in either DDP, with and without overlap."""
    entrants = {
        (model, ddp, way): Entrant(task=task, ddp=ddp, bucket_mib=settings.bucket_mib, register=register)
        for model, task in settings.models.items()
        for ddp in DDPS
        for way, register in _WAYS.items()
    }
    link = link_of(settings.rate, settings.kind)
    notes.tell(f"{len(entrants)} models take {settings.turns} turns at {settings.rate}")
    taken = take_turns(entrants, link, settings.ranks, settings.turns, notes.tell)
    return {
        "cases": [
            {"model": model, "ddp": ddp, "overlap": way, "taken": one} for (model, ddp, way), one in taken.items()
        ]
    }


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return the parts of each iteration, and what overlap saves."""
    cases = measured["cases"]
    rows = []
    for case in cases:
        parts = [three_digits(1e3 * statistics.median(case["taken"][part])) for part in PARTS]
        rows.append([_label(case), *parts, milliseconds(whole(case["taken"]))])
    counts = {case["model"]: case["taken"]["buckets"] for case in cases}
    buckets = ", ".join(f"{model} in {count} buckets" for model, count in counts.items())
    title = f"Parts of an iteration, {settings.ranks} ranks at {settings.rate} ({buckets}): medians over turns"
    columns = ["", "forward, ms", "backward, ms", "exposed, ms", "optimizer, ms"]
    return [
        Table(title, [*columns, "whole, ms (quartiles)"], rows),
        *(_finding(*pair) for pair in zip(cases[::2], cases[1::2], strict=True)),
        Picture(
            "parts",
            "A bar for each model and DDP, with and without overlap, divided into forward, backward, exposed "
            "communication and optimizer",
            lambda theme: _bars(cases, theme),
        ),
    ]


def _label(case: Mapping[str, Any]) -> str:
    return f"{case['model']}, {DDPS[case['ddp']]}, {case['overlap']} overlap"


def _finding(overlapped: Mapping[str, Any], held: Mapping[str, Any]) -> str:
    """Return what overlap saves, with 95 % intervals over the turns."""
    ratio = Ratio.of(whole(overlapped["taken"]), whole(held["taken"]))
    exposed = Ratio.of(overlapped["taken"]["exposed"], held["taken"]["exposed"])
    who = f"{overlapped['model']}, {DDPS[overlapped['ddp']]}"
    if ratio.sign == 0:
        return f"{who}: no difference between iterations with and without overlap was seen: {ratio.text} of the time."
    if ratio.sign > 0:
        return f"{who}: overlap costs time: an iteration takes {ratio.text} times as long (95 % interval)."
    hidden = f" It hides {exposed.saved} of the exposed communication." if exposed.sign < 0 else ""
    return f"{who}: overlap saves {ratio.saved} of an iteration.{hidden} (95 % intervals over turns.)"


def _bars(cases: list[Mapping[str, Any]], theme: Theme) -> Figure:
    figure, axes = canvas(
        "Where an iteration's time goes", "milliseconds (medians of the parts)", 8.4, 1.3 + 0.42 * len(cases)
    )
    colours = (theme.hooks[0], theme.compute, theme.compression, theme.first)
    rows, left = range(len(cases)), [0.0] * len(cases)
    for part, colour in zip(PARTS, colours, strict=True):
        widths = [1e3 * statistics.median(case["taken"][part]) for case in cases]
        label = "exposed communication" if part == "exposed" else part
        axes.barh(rows, widths, left=left, height=0.66, color=colour, label=label)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.set_yticks(rows, [_label(case) for case in cases])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside lower left", ncols=len(PARTS))
    return figure


REPRODUCTION = Reproduction(
    name="ddp-figure-6",
    title="Where an iteration's time goes, with and without overlap",
    source="PyTorch DDP paper (Li et al., VLDB 2020), figure 6",
    said=(
        "The backward pass, with the communication in it, takes most of an iteration (recalled).",
        "Overlap saves about 38 % (ResNet-50) and 35 % (BERT) of an iteration with NCCL, 27 % and 22 % with Gloo "
        "(recalled).",
    ),
    sizes={
        "default": Settings(),
        "tiny": Settings(kind="emulated", rate="100 Mbit/s", models=TINY_MODELS, bucket_mib=0.05, turns=2),
    },
    measure=measure,
    show=show,
)
