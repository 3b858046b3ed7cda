"""The study `predictions`: what `commhooks plan` predicts beside real steps, in twenty settings.

A setting is a model on two ranks over a link of some rate. One world of ranks profiles its steps, without sending
anything, probes the link with what the hooks send, and takes real steps under every hook, in turns. Steps are predicted
in three ways: from the profile over the probed link, from the profile over a link of which only the rate is given, and
from tables, given the time of a step without communication. Nothing is fitted to these steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from commhooks.experiments import stored
from commhooks.experiments.commands.terminal import errors_in_words
from commhooks.experiments.launch import WorldError
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.machine import load_average, machine_in_words
from commhooks.experiments.planning import Link, Profile, plan, profile_from_tables
from commhooks.experiments.planning.costs import Costs, copy_seconds
from commhooks.experiments.planning.measurements import Asked, measure
from commhooks.experiments.planning.worlds import check_place
from commhooks.experiments.report.words import percent
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.timing.link import Network
from experiments.studies.blocks import markdown_table
from experiments.studies.medians import milliseconds

SETTINGS = {
    "gpt:size=small": ("10Mbit/s", "30Mbit/s", "100Mbit/s", "300Mbit/s"),
    "digits:size=medium": ("30Mbit/s", "100Mbit/s", "300Mbit/s", "1Gbit/s"),
    "gpt:size=medium": ("30Mbit/s", "100Mbit/s", "300Mbit/s", "1Gbit/s"),
    "gpt:size=base": ("100Mbit/s", "300Mbit/s", "1Gbit/s", "3Gbit/s"),
    "digits:network=resnet18,batch_size=16": ("300Mbit/s", "700Mbit/s", "1.5Gbit/s", "3Gbit/s"),
}
"""Rates for each model, at which a step takes a second or less."""
HOOKS = ("all-reduce", "fp16", "int8", "top-k:ratio=0.01", "powersgd:rank=4", "powersgd:policy=fused,rank=4")
FILE = Path("docs/guide/plan/cases.json")
PAGE = Path("docs/guide/plan/checked.md")
MEDIAN, WITHIN, OF_ALL = 0.05, 0.15, 0.95
_RANKS = 2
_PATIENCE = 20.0  # seconds between two looks at the load
_FORMAT = 1
_WAYS = ("profile, probe", "profile, link", "tables, link")


@dataclass(frozen=True)
class Case:
    """One setting, under all hooks."""

    task: str
    link: str
    predicted: Mapping[str, Mapping[str, float]]
    """Seconds of a step, by way and hook."""
    uncertainty: Mapping[str, Mapping[str, float]]
    steps: Mapping[str, tuple[float, ...]]
    """Seconds of real steps, by hook."""
    load: float | None
    """Runnable processes before the measurement, mean over a minute."""
    machine: str

    def errors(self, way: str) -> list[float]:
        """Return predicted over measured, minus 1, of every hook."""
        return [self.predicted[way][hook] / statistics.median(steps) - 1 for hook, steps in self.steps.items()]


@dataclass(frozen=True)
class Cases:
    """All settings that have been measured."""

    cases: tuple[Case, ...] = ()


def predictions(
    file: Annotated[Path, typer.Option(help="Keeps the settings that are measured, one by one.")] = FILE,
    page: Annotated[Path, typer.Option(help="Receives the tables.")] = PAGE,
    kind: Annotated[str, typer.Option(help="Of the links: hosts (as root), or emulated.")] = "hosts",
    at_most: Annotated[int, typer.Option(help="Settings to measure now; 0: only write the page.")] = 20,
    seconds: Annotated[float, typer.Option(help="Of each profile, of each probe and of real steps.")] = 14.0,
    load: Annotated[float, typer.Option(help="A setting waits until the machine's load is below this.")] = 1.0,
) -> None:
    """Compare what `commhooks plan` predicts with real steps; settings that the file has are not measured again."""
    with errors_in_words():
        check_place(file, page)
        found = _read(file) if file.exists() else Cases()
        known = {(case.task, case.link) for case in found.cases}
        left = [
            (task, settings)
            for task, rates in SETTINGS.items()
            for rate in rates
            if (task, (settings := LinkSettings.parse(f"{kind}:{rate}")).label) not in known
        ]
        for task, settings in left[:at_most]:
            _wait_for_quiet(load)
            print(f"{task} over {settings.label} ...", flush=True)
            try:
                found = Cases((*found.cases, measured(task, settings, seconds)))
            except WorldError as error:  # the others can be measured nevertheless
                print(error)
                continue
            stored.write(found, file, form=_FORMAT)
        if found.cases:
            text = written(found.cases)
            page.write_text(text, encoding="utf-8")
            print(text)


def _wait_for_quiet(most: float) -> None:
    """Return when few other programs run: beside others, steps take as long as these let them."""
    while (now := load_average()) is not None and now > most:
        print(f"waiting: the load is {now:.1f}, and is to be below {most:g}", flush=True)
        time.sleep(_PATIENCE)


def measured(task: str, settings: LinkSettings, seconds: float) -> Case:
    """Return a setting's predictions and its real steps, measured now."""
    load = load_average()
    asked = Asked(
        task=Spec.parse(task, "task"),
        hooks=tuple(map(Spec.parse, HOOKS)),
        link=settings,
        seconds=seconds,
        probe_seconds=seconds,
        real_seconds=seconds,
    )
    taken = measure(asked, _RANKS)
    assert taken is not None and taken.profile is not None and taken.probe is not None, "this is no rank of torchrun"
    costs, copy, rate = Costs.read(), copy_seconds(), settings.bits_per_second
    assert rate is not None, "every setting has a rate"
    link = costs.on_gloo(Link(rate=rate, latency=settings.latency_seconds, link=settings.label), copy)
    made_up = profile_from_tables(
        load_task(asked.task or Spec("")).model,
        _RANKS,
        compute=taken.profile.noop.seconds.median,
        hooks=HOOKS,
        cores=taken.profile.cores,
        copy=copy,
    )
    ways: Sequence[tuple[Profile, Network]] = (taken.profile, taken.probe), (taken.profile, link), (made_up, link)
    plans = {name: plan(*way) for name, way in zip(_WAYS, ways, strict=True)}
    return Case(
        task,
        settings.label,
        {name: {hook: one.of(hook).seconds for hook in HOOKS} for name, one in plans.items()},
        {name: {hook: one.of(hook).uncertainty for hook in HOOKS} for name, one in plans.items()},
        {hook: tuple(taken.steps["allreduce" if hook == "all-reduce" else hook]) for hook in HOOKS},
        load,
        machine_in_words(),
    )


def written(cases: Sequence[Case]) -> str:
    """Return the page: how close predictions are, and every case."""
    lines = []
    for way in _WAYS:
        errors = np.abs([error for case in cases for error in case.errors(way)])
        median, within = float(np.median(errors)), float((errors <= WITHIN).mean())
        lines.append(
            f"- **{way}**: the median error of {len(errors)} steps is {percent(median)} (goal {percent(MEDIAN)}: "
            f"{'met' if median <= MEDIAN else 'missed'}), and {percent(within)} are within {percent(WITHIN)} (goal "
            f"{percent(OF_ALL)}: {'met' if within >= OF_ALL else 'missed'}); the root of the mean square is "
            f"{percent(float(np.sqrt((errors**2).mean())))}."
        )
    loads = [case.load for case in cases if case.load is not None]
    lines += [
        "",
        f"{len(cases)} of {sum(map(len, SETTINGS.values()))} settings were measured with `python -m "
        f"experiments.studies predictions` on {cases[0].machine}, "
        f"at a load of {min(loads, default=0):.1f} to {max(loads, default=0):.1f}.",
        "",
    ]
    rows = [
        [
            f"`{case.task}`",
            case.link,
            f"`{hook}`",
            milliseconds(case.steps[hook]),
            *(f"{100 * case.errors(way)[number]:+.0f} %" for way in _WAYS),
        ]
        for case in cases
        for number, hook in enumerate(case.steps)
    ]
    headings = ["model", "link", "hook", "measured, ms (quartiles)", *_WAYS]
    return "\n".join([*lines, *markdown_table(headings, rows), ""])


def _read(path: Path) -> Cases:
    try:
        return stored.read(Cases, path, form=_FORMAT)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path}: expected cases of format {_FORMAT} that this study wrote ({type(error).__name__}: {error}); "
            "move it away, and measure again"
        ) from error
