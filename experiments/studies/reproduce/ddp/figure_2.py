"""The basis of overlap in buckets: large all-reduces are cheaper, and gradients are ready one after another.

The same number of elements is all-reduced in calls of different sizes. As a DDP does, a rank starts all calls and then
waits for them. If a size would need too many calls, it is measured on fewer elements, and the time is scaled up. The
sizes take turns. Then one rank alone runs backward passes, without a DDP, and notes when each gradient is ready.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor

from commhooks.experiments.launch import Tell
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.report.plots import Theme, canvas, canvases
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.units import three_digits
from experiments.studies.blocks import Block, Picture, Table
from experiments.studies.medians import Ratio
from experiments.studies.ranks import on_ranks
from experiments.studies.reproduce.ddp.turns import (
    LOOPBACK,
    MODELS,
    TINY_MODELS,
    end_groups,
    groups_on,
    link_of,
    place_in_words,
)
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction
from experiments.studies.turns import as_given, in_turns

NEAR = 1.10  # times the fastest: a call size below which the rest of the cost is negligible
_WARM_UP = 3  # backward passes that are not counted

Row = Mapping[str, Any]
"""The measurements of one size of calls: `size`, and `measured`, the elements of all calls of a turn, and `seconds`,
the time of each turn."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the measurement."""

    kind: str = "hosts"
    ranks: int = 2
    # The elements that are all-reduced in each place.
    places: Mapping[str, int] = field(
        default_factory=lambda: {LOOPBACK: 60_000_000, "10 Gbit/s": 60_000_000, "1 Gbit/s": 6_000_000}
    )
    sizes: tuple[int, ...] = (1_000, 10_000, 100_000, 500_000, 1_000_000, 5_000_000, 20_000_000, 60_000_000)
    calls: int = 1_000  # at most; higher: the smallest sizes are measured on more elements
    turns: int = 9
    models: Mapping[str, str] = field(default_factory=lambda: dict(MODELS))
    steps: int = 20  # backward passes of each model


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return the seconds of all-reduces in calls of each size, and when each gradient was ready."""
    first = next(iter(settings.places))
    found = {}
    for place, elements in settings.places.items():
        notes.tell(place)
        link = link_of(place, settings.kind)
        ask = partial(_on_rank, settings, elements, link, place == first)
        found[place] = notes.once(place, partial(on_ranks, ask, settings.ranks, notes.tell, link=link))
    return {
        "places": [{"place": place, "rows": part["rows"]} for place, part in found.items()],
        "models": found[first]["models"],
    }


def _on_rank(settings: Settings, elements: int, link: LinkSettings, with_models: bool, tell: Tell) -> dict[str, Any]:
    """All-reduce in calls of every size, in turns; before, rank 0 may run the backward passes, while others wait."""
    models = []
    if with_models and dist.get_rank() == 0:
        tell("  backward passes of one rank")
        models = [_readiness(*each, settings.steps) for each in settings.models.items()]
    groups = groups_on(link)
    data = torch.zeros(elements)  # sums stay zero, however often they are taken
    pieces = {size: data.split(size)[: settings.calls] for size in settings.sizes if size <= elements}
    calls = {size: partial(_all_reduce, own, groups[0]) for size, own in pieces.items()}
    # The first round opens connections and touches memory.
    seconds = in_turns(calls, settings.turns, warm_up=1, order=as_given, tell=tell)
    end_groups(groups)
    rows = [{"size": size, "measured": sum(map(len, own)), "seconds": seconds[size]} for size, own in pieces.items()]
    return {"rows": rows, "models": models}


def _readiness(model: str, label: str, steps: int) -> dict[str, Any]:
    """Return when each gradient was ready in each backward pass: seconds since its beginning."""
    task = load_task(Spec.parse(label, "task"))
    parameters = list(task.model.parameters())
    ready: dict[Tensor, float] = {}
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda own: ready.update({own: time.perf_counter()}))
    passes = []
    for step in range(_WARM_UP + steps):
        loss = task.loss(task.model, task.batch(step, 0, 2))
        begun = time.perf_counter()
        loss.backward()
        times = [ready[parameter] - begun for parameter in parameters]
        task.model.zero_grad()
        if step >= _WARM_UP:
            passes.append(times)
    return {"model": model, "elements": [parameter.numel() for parameter in parameters], "passes": passes}


def _all_reduce(pieces: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Start a call for each piece, and wait for all."""
    works = [dist.all_reduce(piece, group=group, async_op=True) for piece in pieces]
    for work in works:
        assert work is not None, "async_op=True returns a work"
        work.wait()


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return the time by the size of calls, the size at which it stops falling, and the gradients' times."""
    total = max(settings.places.values())
    blocks: list[Block] = []
    for each in measured["places"]:
        rows = []
        for row in each["rows"]:
            low, median, high = (three_digits(one) for one in _quartiles(row, total))
            measured_share = f"{row['measured'] / 1e6:g}"
            rows.append([_count(row["size"]), measured_share, f"{median} ({low} to {high})"])
        columns = ["elements a call", "measured, million", f"{_count(total)} fp32, s (quartiles)"]
        blocks += [
            Table(f"{place_in_words(each['place'])}: all-reduce by {settings.ranks} ranks", columns, rows),
            f"{place_in_words(each['place'])}, {saturation(each['rows'])}",
        ]
    caption = "Time of an all-reduce of the same number of elements against the elements of a call, a line per place"
    blocks.append(Picture("calls", caption, partial(_draw_calls, measured["places"], total)))
    rows = [_half_way(each) for each in measured["models"]]
    columns = ["", "gradients", "backward pass, ms", "first ready after", "gradients half-way"]
    title = f"When gradients are ready: medians of {settings.steps} backward passes, with their range"
    blocks.append(Table(title, [*columns, "elements half-way"], rows))
    blocks += [
        f"{name}: the first gradient is ready after {first} of the backward pass, and half-way through it {gradients} "
        f"of the gradients are, which hold {elements} of the elements."
        for name, _, _, first, gradients, elements in rows
    ]
    caption = "Share of a model's elements whose gradients are ready, against the time since the backward pass began"
    blocks.append(Picture("gradients", caption, partial(_draw_gradients, measured["models"])))
    return blocks


def saturation(rows: Sequence[Row]) -> str:
    """Return which calls are fastest, which smaller ones come near, and what the extremes lose."""
    per_element = {row["size"]: [one / row["measured"] for one in row["seconds"]] for row in rows}
    best = min(per_element, key=lambda size: statistics.median(per_element[size]))
    against = {size: Ratio.of(seconds, per_element[best]) for size, seconds in per_element.items()}
    enough = next(size for size in sorted(against) if against[size].median <= NEAR)
    text = f"the fastest calls have {_count(best)} elements"
    if enough != best:
        text += f", and the smallest whose time is within {100 * (NEAR - 1):.0f} % of theirs have {_count(enough)}"
    for size in (min(against), max(against)):
        if size != best and against[size].sign > 0:
            text += f"; calls of {_count(size)} take {against[size].text} times as long"
        elif size != best:
            text += f"; no difference from them was seen with {_count(size)}"
    return f"{text}."


def _half_way(each: Mapping[str, Any]) -> list[str]:
    """Return a row of the table: the gradients that are ready half-way through the backward passes of a model."""
    elements = np.array(each["elements"])
    first, counts, shares = [], [], []
    for times in np.array(each["passes"]):
        ready = times <= times.max() / 2
        first.append(times.min() / times.max())
        counts.append(ready.mean())
        shares.append(elements[ready].sum() / elements.sum())
    whole = statistics.median(max(times) for times in each["passes"])
    cells = (
        f"{100 * statistics.median(values):.0f} % ({100 * min(values):.0f} to {100 * max(values):.0f})"
        for values in (first, counts, shares)
    )
    return [each["model"], str(len(elements)), three_digits(1e3 * whole), *cells]


def _quartiles(row: Row, total: int) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile of the seconds, scaled to a number of elements."""
    spread = Spread.of(row["seconds"])
    low, median, high = (one * total / row["measured"] for one in (spread.low, spread.median, spread.high))
    return low, median, high


def _count(elements: float) -> str:
    return f"{elements / 1e6:g} M" if elements >= 1_000_000 else f"{elements / 1e3:g} K"


def _draw_calls(places: Sequence[Mapping[str, Any]], total: int, theme: Theme) -> Figure:
    title = f"All-reduce of {_count(total)} fp32 elements (median, quartiles)"
    figure, axes = canvas(title, "elements a call", 7.2, 3.6)
    for each, colour in zip(places, theme.hooks, strict=False):
        sizes = [row["size"] for row in each["rows"]]
        low, median, high = np.array([_quartiles(row, total) for row in each["rows"]]).T
        axes.plot(sizes, median, marker="o", markersize=4, color=colour, label=each["place"])
        axes.fill_between(sizes, low, high, color=colour, alpha=0.25, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda size, place: _count(size))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("seconds")
    axes.legend()
    return figure


def _draw_gradients(models: Sequence[Mapping[str, Any]], theme: Theme) -> Figure:
    figure, every = canvases("", "", 7.6, 3.4, columns=len(models), sharey=True)
    for axes, each, colour in zip(every, models, theme.hooks, strict=False):
        passes = 1e3 * np.array(each["passes"])
        order = np.median(passes, axis=0).argsort()
        elements = np.array(each["elements"])[order]
        share = 100 * elements.cumsum() / elements.sum()
        low, middle, high = (edge(passes[:, order], axis=0) for edge in (np.min, np.median, np.max))
        axes.step([0, *middle], [0, *share], where="post", color=colour)
        axes.fill_betweenx(share, low, high, step="pre", color=colour, alpha=0.25, linewidth=0)
        axes.set_xlim(0, 1.25 * middle[-1])  # one pass that was disturbed must not squeeze the others
        axes.set_title(each["model"], loc="left", fontweight="bold")
        axes.set_xlabel("ms since the backward pass began")
    every[0].set_ylabel("elements whose gradients are ready, %")
    return figure


REPRODUCTION = Reproduction(
    name="ddp-figure-2",
    title="The cost of small all-reduces, and when gradients are ready",
    source="PyTorch DDP paper (Li et al., VLDB 2020), figure 2",
    said=(
        "The time to all-reduce 60 million fp32 elements falls as calls get larger: with Gloo up to about 500,000 "
        "elements a call, with NCCL still at 20 million (recalled).",
        "Gradients become ready over the whole backward pass, so that communication can overlap with it.",
    ),
    sizes={
        "default": Settings(),
        "tiny": Settings(
            kind="emulated",
            places={"100 Mbit/s": 20_000},
            sizes=(1_000, 10_000, 20_000),
            turns=2,
            models=TINY_MODELS,
            steps=3,
        ),
    },
    measure=measure,
    show=show,
)
