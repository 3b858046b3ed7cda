"""The time of an iteration if buckets go to several process groups in turn.

PyTorch's round-robin group of the paper's time is gone. In its place a communication hook has a list of Gloo groups,
and all-reduces bucket k on group k modulo their number. Every rank launches its buckets in the same order, so each
group runs its collectives in the same order everywhere, and nothing can deadlock. The models take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from commhooks.experiments.report.plots import Theme, canvases
from commhooks.experiments.report.words import listed
from experiments.studies.blocks import Block, Picture, Table
from experiments.studies.medians import Ratio, milliseconds
from experiments.studies.reproduce.ddp.hooks import use_groups_in_turn
from experiments.studies.reproduce.ddp.turns import (
    DDPS,
    LOOPBACK,
    TINY_MODELS,
    Entrant,
    link_of,
    place_in_words,
    take_turns,
    whole,
)
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction

_RIGHT = 2.5  # edge of the picture: what a disturbed turn adds beyond it is cut off
_FARTHEST = 10.0  # of intervals that have no end

Case = Mapping[str, Any]
"""A model in a DDP: the seconds of each turn for every number of groups, as text."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the measurement."""

    kind: str = "hosts"
    places: tuple[str, ...] = (LOOPBACK, "1 Gbit/s")
    ranks: int = 2
    models: Mapping[str, str] = field(
        default_factory=lambda: {
            "GPT of 1.9 M": "gpt:size=medium",
            "ResNet-18 of 11.2 M": "digits:network=resnet18,batch_size=16",
        }
    )
    groups: tuple[int, ...] = (1, 3, 5)  # the first is what the others are compared with
    bucket_mib: float = 1.0  # lower: more buckets, and more of them at the same time
    turns: int = 11


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return the turns of every model in either DDP, in every place."""
    return {
        "places": [
            {"place": place, "cases": notes.once(place, partial(_cases, place, settings, notes))}
            for place in settings.places
        ]
    }


def _cases(place: str, settings: Settings, notes: Notes) -> list[Case]:
    entrants = {
        (model, ddp, count): Entrant(
            task=task, ddp=ddp, bucket_mib=settings.bucket_mib, register=partial(use_groups_in_turn, count=count)
        )
        for model, task in settings.models.items()
        for ddp in DDPS
        for count in settings.groups
    }
    notes.tell(f"{place}: {len(entrants)} models take {settings.turns} turns")
    link = link_of(place, settings.kind)
    taken = take_turns(entrants, link, settings.ranks, settings.turns, notes.tell, groups=max(settings.groups))
    return [
        {
            "model": model,
            "ddp": ddp,
            "buckets": taken[model, ddp, settings.groups[0]]["buckets"],
            "seconds": {str(count): whole(taken[model, ddp, count]) for count in settings.groups},
        }
        for model in settings.models
        for ddp in DDPS
    ]


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return the time with each number of groups, against the first."""
    blocks: list[Block] = []
    first, *others = map(str, settings.groups)
    for each in measured["places"]:
        rows = [
            [_label(case), str(case["buckets"]), milliseconds(case["seconds"][first])]
            + [Ratio.of(case["seconds"][count], case["seconds"][first]).text for count in others]
            for case in each["cases"]
        ]
        where = place_in_words(each["place"])
        title = f"{where}: an iteration of {settings.ranks} ranks, buckets of {settings.bucket_mib:g} MiB"
        columns = ["", "buckets", f"{_groups(first)}, ms (quartiles)"]
        columns += [f"{_groups(count)}, of that time (95 %)" for count in others]
        blocks += [
            Table(title, columns, rows),
            f"{where}, {compared(each['cases'], first, others)}",
        ]
    caption = "For each place, the time of an iteration with each number of groups as a share of that with the first"
    return [*blocks, Picture("groups", caption, partial(_points, settings, measured["places"]))]


def compared(cases: Sequence[Case], first: str, others: Sequence[str]) -> str:
    """Return for which models more groups are faster or slower than the first number of groups."""
    found: dict[int, list[str]] = {-1: [], 1: [], 0: []}
    for case in cases:
        for count in others:
            ratio = Ratio.of(case["seconds"][count], case["seconds"][first])
            figure = f" ({ratio.text} of the time)" if ratio.sign else ""
            found[ratio.sign].append(f"{_label(case)} with {_groups(count)}{figure}")
    pieces = [f"{word}: {listed(found[sign])}" for sign, word in ((-1, "faster"), (1, "slower")) if found[sign]]
    if found[0]:
        pieces.append(f"no difference seen: {listed(found[0]) if pieces else 'all models, any number of groups'}")
    return f"compared with {_groups(first)}, {'; '.join(pieces)}."


def _label(case: Case) -> str:
    return f"{case['model']}, {DDPS[case['ddp']]}"


def _groups(count: str) -> str:
    return f"{count} group{'' if count == '1' else 's'}"


def _points(settings: Settings, places: Sequence[Mapping[str, Any]], theme: Theme) -> Figure:
    first, *others = map(str, settings.groups)
    label = f"time of an iteration, as a share of that with {_groups(first)} (95 % interval)"
    height = 1.0 + len(places) * (0.5 + 0.36 * len(places[0]["cases"]))
    figure, every = canvases("", label, 7.6, height, rows=len(places))
    for axes, each in zip(every, places, strict=True):
        axes.set_title(place_in_words(each["place"]), loc="left", fontweight="bold")
        axes.axvline(1, color=theme.first, linewidth=1.2)
        for number, (count, colour) in enumerate(zip(others, theme.hooks, strict=False)):
            ratios = [Ratio.of(case["seconds"][count], case["seconds"][first]) for case in each["cases"]]
            rows = [row + 0.22 * (number - (len(others) - 1) / 2) for row in range(len(ratios))]
            middles = [ratio.median for ratio in ratios]
            reach = [[r.median - r.low for r in ratios], [min(r.high, _FARTHEST) - r.median for r in ratios]]
            axes.errorbar(middles, rows, xerr=reach, fmt="o", color=colour, markersize=5, label=_groups(count))
        axes.set_yticks(range(len(each["cases"])), [_label(case) for case in each["cases"]])
        axes.set_ylim(len(each["cases"]) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
    every[0].set_xlim(right=min(every[0].get_xlim()[1], _RIGHT))
    handles, labels = every[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels))
    return figure


REPRODUCTION = Reproduction(
    name="ddp-figure-12",
    title="Several process groups in turn",
    source="PyTorch DDP paper (Li et al., VLDB 2020), figure 12",
    said=(
        "With a round-robin group over 3 process groups, a large model is about a third faster than with one group "
        "(recalled).",
    ),
    sizes={
        "default": Settings(),
        "tiny": Settings(
            kind="emulated", places=("100 Mbit/s",), models=TINY_MODELS, groups=(1, 3), bucket_mib=0.02, turns=2
        ),
    },
    measure=measure,
    show=show,
)
