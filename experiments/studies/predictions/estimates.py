"""The study `estimates`: what `commhooks estimate` says beside real steps, in twenty configurations.

The estimate is given the shapes of the model, the compute that was measured without communication, the ranks, the rate
and the costs that come with the package; nothing was fitted to these steps.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from commhooks.saving.files import read_json
from commhooks.units import three_digits
from experiments.commands.terminal import errors_in_words
from experiments.estimate.showing import rates_in_words
from experiments.links.link import LinkSettings, format_rate
from experiments.machine import machine, versions
from experiments.planning.worlds import check_place
from experiments.report.table import markdown_table
from experiments.report.words import percent
from experiments.results.medians import milliseconds
from experiments.runs import RunSettings
from experiments.specs import Spec
from experiments.tasks import load_task

from ...predicting import stored
from ...predicting.candidates import DENSE
from ...predicting.costs import copy_seconds
from ...predicting.estimates import estimate
from ...predicting.paying import Rates
from .steps import Steps, measure_steps


@dataclass(frozen=True, kw_only=True)
class World:
    """A task on hosts of one rank each, at several rates."""

    task: str
    ranks: int
    hooks: tuple[str, ...]
    rates: tuple[float, ...]  # bits per second, as reported
    turns: int = 9
    kind: str = "hosts"  # or "emulated"


@dataclass(frozen=True, kw_only=True)
class StepsAt(Steps):
    """The steps of a world at one of its rates."""

    world: World
    rate: float


FOLDER = Path("docs/guide/estimate")
STEPS, TABLE = "steps.json", "checked.md"
_GPT, _SMALL_GPT = "gpt:size=base", "gpt:size=medium,width=128,heads=4,batch_size=8"
_RESNET = "digits:network=resnet18,batch_size=16"
WORLDS = (
    World(task=_GPT, ranks=2, hooks=(DENSE, "int8", "powersgd:rank=4", "top-k:ratio=0.1"), rates=(0.6e9, 1.7e9)),
    World(task=_GPT, ranks=4, hooks=(DENSE, "int8", "sign"), rates=(1e9, 3e9), turns=7),
    World(task=_SMALL_GPT, ranks=2, hooks=(DENSE, "int8", "top-k:ratio=0.01"), rates=(0.3e9, 1e9)),
    World(task=_RESNET, ranks=2, hooks=(DENSE, "int4", "dgc:ratio=0.01", "fp16"), rates=(0.7e9, 2e9), turns=5),
)
CONFIGURATIONS = sum(len(world.rates) * (len(world.hooks) - 1) for world in WORLDS)
"""Pairs of a hook and dense all-reduce at some rate."""
WITHIN, OF_ALL = 0.2, 19 / 20


@dataclass(frozen=True)
class Checked:
    """A hook in one configuration."""

    steps: StepsAt
    hook: str
    estimated: float  # seconds
    said_to_pay: bool
    pays_between: Rates  # estimated

    @property
    def measured(self) -> float:
        """The median step."""
        return statistics.median(self.steps.seconds[self.hook])

    @property
    def pays(self) -> bool:
        """True if the median step was faster than under dense all-reduce."""
        return self.measured < statistics.median(self.steps.seconds[DENSE])

    @property
    def ratio(self) -> float:
        """Estimated over measured."""
        return self.estimated / self.measured

    @property
    def is_close(self) -> bool:
        """True if the rate lies within a factor of 2 of an estimated break-even rate."""
        return any(0.5 <= self.steps.rate / rate <= 2 for edges in self.pays_between for rate in edges if rate)


def measured(world: World) -> list[StepsAt]:
    """Return a world's steps, at each of its rates."""
    found = []
    for rate in world.rates:
        link = LinkSettings(kind=world.kind, bits_per_second=rate)
        settings = RunSettings(task=Spec.parse(world.task, "task"), ranks=world.ranks, link=link)
        taken = measure_steps(settings, world.hooks, world.turns, print)
        found.append(StepsAt(world=world, rate=rate, **vars(taken)))
    return found


def check(steps: Sequence[StepsAt], copy_rate: float) -> list[Checked]:
    """Return estimates beside measured steps; `copy_rate` belongs to the machine that took the steps."""
    found = []
    for one in steps:
        answer = estimate(
            load_task(one.world.task).model,
            compute=one.compute,
            optimizer=one.optimizer,
            ranks=one.world.ranks,
            rate=one.rate,
            latency=0.0,  # between namespaces
            hooks=one.world.hooks,
            copy_rate=copy_rate,
        )
        for hook in one.world.hooks:
            own = answer.of(hook)
            found.append(Checked(one, hook, own.time.seconds, own.pays, own.pays_between))
    return found


def page(checked: Sequence[Checked], about: Mapping[str, Any]) -> str:
    """Return the table of all configurations, and how many are right, as Markdown."""
    rows = []
    for one in checked:
        dense = one.hook == DENSE
        rows.append(
            [
                f"`{one.steps.world.task}`",
                str(one.steps.world.ranks),
                format_rate(one.steps.rate),
                f"`{one.hook}`",
                three_digits(1e3 * one.estimated),
                milliseconds(one.steps.seconds[one.hook]),
                f"{one.ratio:.2f}",
                "" if dense else " / ".join("yes" if pays else "no" for pays in (one.said_to_pay, one.pays)),
                "" if dense else rates_in_words(one.pays_between),
            ]
        )
    columns = ["model", "ranks", "rate", "hook", "estimated, ms", "measured, ms (quartiles)", "ratio"]
    table = markdown_table([*columns, "pays, estimated / measured", "estimated to pay at rates"], rows)
    return "\n".join([*table, *_verdict(checked), "", _about(about), ""])


def _verdict(checked: Sequence[Checked]) -> list[str]:
    errors = np.abs([one.ratio - 1 for one in checked])
    hooks = [one for one in checked if one.hook != DENSE]
    right = sum(one.said_to_pay == one.pays for one in hooks)
    close = [one for one in hooks if one.is_close]
    right_close = sum(one.said_to_pay == one.pays for one in close)
    return [
        f"Of {len(checked)} step times {int((errors <= WITHIN).sum())} are within {percent(WITHIN)} of the measured "
        f"one; the median error is {percent(float(np.median(errors)))}, the largest {percent(float(errors.max()))}. "
        f'Of {len(hooks)} configurations {right} are on the right side of "pays", and {right_close} of the '
        f"{len(close)} whose rate is within a factor of 2 of the estimated break-even rate. "
        f"The goals were {percent(WITHIN)} for all ({'met' if errors.max() <= WITHIN else 'missed'}) and 19 of 20 "
        f"({_outcome(right, len(hooks))}).",
    ]


def _outcome(right: int, measured: int) -> str:
    """Return "met" or "missed", whether enough are right; undecided unless all configurations were measured."""
    if measured < CONFIGURATIONS:
        return f"undecided: {measured} of the {CONFIGURATIONS} configurations were measured"
    return "met" if right >= OF_ALL * measured else "missed"


def _about(about: Mapping[str, Any]) -> str:
    here, numbers = about["machine"], ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return (
        f"Measured with `python -m experiments.studies estimates --measure` on {here['processor']}, {here['cores']} "
        f"cores, which copied {three_digits(about['copy_rate'] / 1e9)} GB/s, with {numbers}, over Gloo."
    )


def estimates(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the steps, as root, in five minutes; otherwise: the folder's.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Has the steps, and receives the table.")] = FOLDER,
    world: Annotated[
        list[int] | None, typer.Option(help="Measure only this one of the worlds, from 0 on. Repeat for more.")
    ] = None,
) -> None:
    """Compare what `commhooks estimate` says with real steps on hosts in network namespaces."""
    with errors_in_words():
        path = folder / STEPS
        if world and not measure:
            raise ValueError("--world says which steps are measured: give it with --measure")
        if unknown := [number for number in world or () if number not in range(len(WORLDS))]:
            raise ValueError(f"world {unknown[0]}: expected a number from 0 to {len(WORLDS) - 1}")
        if not measure and not path.exists():
            raise ValueError(f"{path} does not exist: measure the steps with --measure, or name another folder")
        check_place(path)
        about = read_json(path) if path.exists() else {"steps": {}}
        if measure:
            about |= {"machine": machine(), "versions": versions(), "copy_rate": 4 / copy_seconds()}
            for number in world or range(len(WORLDS)):
                about["steps"][str(number)] = [dataclasses.asdict(one) for one in measured(WORLDS[number])]
                stored.write_text(path, json.dumps(about, indent=1) + "\n")
            about = read_json(path)  # lists, as after a measurement of another day
        steps = stored.made_of(Mapping[str, tuple[StepsAt, ...]], about["steps"])
        text = page(check([one for number in sorted(steps) for one in steps[number]], about["copy_rate"]), about)
        (folder / TABLE).write_text(text, encoding="utf-8")
        print(text)
