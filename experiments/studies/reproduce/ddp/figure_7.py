"""The time of an iteration with buckets of different sizes, on fewer hosts (figure 7) and on more (figure 8).

The same model is in memory once per size, and the copies take turns; one world of ranks for each model and number of
hosts. Size 0 gives every gradient a bucket of its own, and the last size puts all of them into one. If ranks share
cores, time is dilated (`commhooks.experiments.machine.dilation`), so that each has what one core computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from commhooks.experiments.machine import dilation
from commhooks.experiments.report.plots import Theme, canvas
from commhooks.experiments.report.words import listed
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from ddp_core.buckets import MIB
from experiments.studies.blocks import Block, Picture, Table
from experiments.studies.medians import Ratio, milliseconds
from experiments.studies.reproduce.ddp.turns import DDPS, MODELS, TINY_MODELS, Entrant, link_of, take_turns, whole
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction

Row = Mapping[str, Any]
"""The row of one size: its label, its number of buckets, and the seconds of each turn."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the measurement."""

    kind: str = "hosts"
    rate: str = "1 Gbit/s"
    worlds: tuple[int, ...] = (2, 4)  # numbers of hosts
    ddp: str = "core"
    models: Mapping[str, str] = field(default_factory=lambda: dict(MODELS))
    bucket_mib: tuple[float, ...] = (0, 1, 2, 5, 10, 25)  # those below a model's size, which comes last
    turns: int = 10


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return every model's turns at each size, for each number of hosts."""
    return {
        "models": [
            {
                "model": model,
                "ranks": ranks,
                "rows": notes.once(f"{model} on {ranks}", partial(_rows, task, ranks, settings, notes)),
            }
            for ranks in settings.worlds
            for model, task in settings.models.items()
        ]
    }


def _rows(task: str, ranks: int, settings: Settings, notes: Notes) -> list[Row]:
    model = load_task(Spec.parse(task, "task")).model
    mib = sum(parameter.nbytes for parameter in model.parameters()) / MIB
    sizes = {f"{size:g}": max(size, 1 / MIB) for size in settings.bucket_mib if size < mib} | {"all": mib + 1}
    entrants = {label: Entrant(task=task, ddp=settings.ddp, bucket_mib=size) for label, size in sizes.items()}
    slower = dilation(ranks)
    link = link_of(settings.rate, settings.kind).slowed(slower)
    notes.tell(f"{task} ({mib:.1f} MiB) on {ranks} ranks in {len(sizes)} sizes of buckets: {settings.turns} turns")
    return [
        {"size": label, "buckets": one["buckets"], "seconds": [seconds / slower for seconds in whole(one)]}
        for label, one in take_turns(entrants, link, ranks, settings.turns, notes.tell).items()
    ]


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return each size's time, and where the optimum lies."""
    blocks: list[Block] = []
    for number, each in enumerate(measured["models"], start=1):
        best = fastest(each["rows"])
        rows = [
            [
                row["size"],
                str(row["buckets"]),
                milliseconds(row["seconds"]),
                "1" if row is best else Ratio.of(row["seconds"], best["seconds"]).text,
            ]
            for row in each["rows"]
        ]
        setting = f"{each['model']} on {each['ranks']} hosts"
        title = f"{setting} at {settings.rate}, {DDPS[settings.ddp]}: {settings.turns} turns"
        columns = ["bucket size, MiB", "buckets", "iteration, ms (quartiles)", "of the fastest's time (95 %)"]
        caption = f"Boxes of the quartiles of an iteration's time at each bucket size: {setting}"
        blocks += [
            Table(title, columns, rows),
            f"{setting}: {optimum(each['rows'])}",
            Picture(f"latency-{number}", caption, partial(_boxes, each)),
        ]
    return blocks


def fastest(rows: Sequence[Row]) -> Row:
    """Return the size with the lowest median."""
    return min(rows, key=lambda row: Spread.of(row["seconds"]).median)


def optimum(rows: Sequence[Row]) -> str:
    """Return where the optimum lies, from the smallest size to the largest, and what the extremes lose."""
    best, extremes = fastest(rows), (rows[0], rows[-1])
    against = {row["size"]: Ratio.of(row["seconds"], best["seconds"]) for row in rows if row is not best}
    text = f"the median is lowest with {_size(best)}"
    if best in extremes:
        text = f"no optimum between the extremes was seen: {text}"
    elif all(against[row["size"]].sign > 0 for row in extremes):
        text = f"the optimum lies between the extremes: {text}"
    else:
        same = listed([_size(row) for row in extremes if against[row["size"]].sign <= 0])
        text = f"no optimum between the extremes was seen: {text}, which does not differ measurably from {same}"
    for row in extremes:
        if row is not best and (ratio := against[row["size"]]).sign > 0:
            text += f"; {_size(row)} takes {ratio.text} times as long"
    others = [row["size"] for row in rows[1:-1] if row is not best and against[row["size"]].sign == 0]
    return f"{text}.{f' Buckets of {listed(others)} MiB do not differ measurably from the fastest.' if others else ''}"


def _size(row: Row) -> str:
    words = {"0": "one bucket per gradient", "all": "all in one bucket"}
    return words.get(row["size"], f"buckets of {row['size']} MiB")


def _boxes(each: Mapping[str, Any], theme: Theme) -> Figure:
    title = f"{each['model']} on {each['ranks']} hosts: time of an iteration (quartiles and range)"
    figure, axes = canvas(title, "bucket size, MiB (0: one bucket per gradient; all: one bucket)", 7.2, 3.2)
    ink = {"color": theme.ink}
    axes.boxplot(
        [1e3 * np.array(row["seconds"]) for row in each["rows"]],
        whis=(0, 100),
        tick_labels=[row["size"] for row in each["rows"]],
        patch_artist=True,
        boxprops={"facecolor": theme.hooks[0], "edgecolor": theme.ink},
        medianprops=ink,
        whiskerprops=ink,
        capprops=ink,
    )
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.grid(axis="x", visible=False)
    return figure


REPRODUCTION = Reproduction(
    name="ddp-figure-7",
    title="How long an iteration takes with buckets of different sizes",
    source="PyTorch DDP paper (Li et al., VLDB 2020), figures 7 and 8",
    said=(
        "The best bucket size lies between the extremes: one bucket per gradient pays for many small messages, one "
        "bucket for all cannot overlap.",
        "With Gloo the best size was about 5 MB, smaller than with NCCL (recalled).",
    ),
    sizes={
        "default": Settings(),
        "tiny": Settings(
            kind="emulated",
            rate="100 Mbit/s",
            worlds=(2,),
            models=TINY_MODELS,
            bucket_mib=(0, 0.05),
            turns=2,
        ),
    },
    measure=measure,
    show=show,
)
