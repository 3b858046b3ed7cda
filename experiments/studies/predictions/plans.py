"""The study `plans`: what `commhooks plan` predicts beside real steps.

For each of five models one world of two ranks profiles the steps, without sending anything, probes the link with what
the model's hooks send, and takes real steps under every hook, in turns. Predictions are made of probe and profile
alone; `--repeat` does all of it again, and counts how often there was no prediction. Ranks ask the kernel
for short time slices, so that other programs on the machine, which run while ranks wait for the link, do not keep them
from going on.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from commhooks.errors import CommHooksError
from experiments.commands.terminal import errors_in_words
from experiments.launch import Send
from experiments.links.link import LinkSettings
from experiments.planning.probing import Asked as ProbeAsked
from experiments.planning.probing import check_probe, probe_link
from experiments.planning.profiling import Asked as ProfileAsked
from experiments.planning.profiling import check_asked, profile_step, stepper
from experiments.planning.stepping import measure_steps
from experiments.planning.worlds import around, check_place, check_world, run_over
from experiments.specs import Spec

from ...predicting import stored
from ...predicting.candidates import ALL_REDUCE, NOOP, default_candidates, with_the_two
from ...predicting.plans import plan
from ...predicting.probes import MOST_DISAGREEMENT

TASKS = ("gpt:size=medium", "lstm:size=medium", "digits:size=medium", "digits:size=tiny,channels=512", "gpt:size=base")
HOOKS = ("fp16", "int8", "powersgd:rank=4", "top-k:ratio=0.01", "powersgd:policy=fused,rank=1")
RANKS = 2
_FORMAT = 1  # of the file of cases
_SLICE_NANOSECONDS = 100_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the number of the system call; neither Python nor glibc has it


@dataclass(frozen=True)
class Case:
    """Steps of one model under one hook, over one link."""

    link: str
    task: str
    hook: str
    predicted: float
    uncertainty: float
    recommended: str
    """The hook that the plan recommends for this model and link."""
    steps: tuple[float, ...]
    """Seconds of each real step."""
    disagreement: float = 0.0
    """The largest disagreement of two halves of the probe, as a fraction."""

    @property
    def measured(self) -> float:
        """The median of the real steps."""
        return statistics.median(self.steps)

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Cases:
    """The measurements over one link."""

    cases: tuple[Case, ...]
    refused: tuple[str, ...] = ()
    """The reasons for each prediction that failed."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The settings of the measurement over one link."""

    link: LinkSettings
    tasks: tuple[str, ...] = TASKS
    seconds: float = 12.0  # of each profile, and of each model's real steps
    probe_seconds: float = 20.0
    repeat: int = 1


def measure(work: Work) -> Cases:
    """Return the cases of all models over a link."""
    cases: list[Case] = []
    refused: list[str] = []

    def hear(message: object) -> None:
        if isinstance(message, Case):
            cases.append(message)
        else:
            refused.append(str(message))

    run_over(work.link, _on_rank, RANKS, work, hear, timeout=120.0 + work.probe_seconds)
    return Cases(tuple(cases), tuple(refused))


def _asked(work: Work, task: str) -> ProfileAsked:
    hooks = tuple(map(Spec.parse, HOOKS))
    return ProfileAsked(task=Spec.parse(task, "task"), hooks=hooks, link=work.link, seconds=work.seconds)


def summary(cases: Sequence[Case]) -> Mapping[str, float]:
    """Return the median error, the part of cases within 15 %, and of recommended hooks that are nearly the fastest.

    The last figure allows as much more as the upper quartile of the all-reduce's own steps lies above their median.
    """
    errors = np.abs([case.error for case in cases])
    slower, spread = [], []
    for link, task in dict.fromkeys((case.link, case.task) for case in cases):
        own = {case.hook: case for case in cases if (case.link, case.task) == (link, task)}
        recommended = next(iter(own.values())).recommended
        slower.append(own[recommended].measured / min(case.measured for case in own.values()) - 1)
        spread.append(float(np.quantile(own[ALL_REDUCE].steps, 0.75)) / own[ALL_REDUCE].measured - 1)
    return {
        "median error": float(np.median(errors)),
        "within 15 %": float((errors <= 0.15).mean()),
        "recommended within 5 % of the fastest": float((np.asarray(slower) <= 0.05).mean()),
        "within 5 % and the spread": float((np.asarray(slower) <= 0.05 + np.asarray(spread)).mean()),
    }


def _on_rank(rank: int, ranks: int, work: Work, send: Send) -> None:
    _ask_for_short_slices()
    candidates = [one for one in with_the_two(default_candidates()) if one.label in (*HOOKS, NOOP, ALL_REDUCE)]
    for task in work.tasks * work.repeat:
        asked = _asked(work, task)
        with stepper(asked) as step:
            try:
                profile = profile_step(step, asked)
                probe = probe_link(ProbeAsked(work.link, work.probe_seconds, 1, profile=profile))
                found = plan(profile, probe, model=step.ddp)
            except CommHooksError as error:  # the same on all ranks
                if rank == 0:
                    send(f"{task}: {error}")
                continue
            measured = measure_steps(step, candidates, work.seconds, around(work.link))
        for choice in found.choices if rank == 0 else ():
            steps = tuple(measured[choice.label])
            link, recommended = work.link.label, found.recommended.label
            send(
                Case(
                    link, task, choice.label, choice.seconds, choice.uncertainty, recommended, steps, probe.disagreement
                )
            )


def _ask_for_short_slices() -> None:
    """Ask the kernel to let this process go on soon after it has waited; where that is not possible, do nothing."""
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return
    # size, policy (the usual one), flags, nice, priority, slice, deadline, period
    attributes = struct.pack("IIQiIQQQ", 48, 0, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, _SLICE_NANOSECONDS, 0, 0)
    for thread in Path("/proc/self/task").iterdir():
        ctypes.CDLL(None).syscall(number, int(thread.name), attributes, 0)


def plans(
    link: Annotated[str, typer.Option(help="hosts:1Gbit/s (as root), or unlimited.")] = "unlimited",
    task: Annotated[list[str] | None, typer.Option(help="Default: five models. Repeat for more.")] = None,
    seconds: Annotated[float, typer.Option(help="Of each profile, and of real steps.")] = 12.0,
    json: Annotated[Path | None, typer.Option(help="Keep the cases in this file.")] = None,
    kept: Annotated[list[Path] | None, typer.Option(help="Measure nothing: show this file. Repeat for more.")] = None,
    probe_seconds: Annotated[float, typer.Option(help="Of each probe.")] = 20.0,
    repeat: Annotated[int, typer.Option(help="How often each model is predicted and measured.")] = 1,
) -> None:
    """Compare what `commhooks plan` predicts with real steps under every hook, and print tables in Markdown."""
    with errors_in_words():
        check_place(json)
        if kept:
            files = [_read(path) for path in kept]
            found = Cases(sum((one.cases for one in files), ()), sum((one.refused for one in files), ()))
        else:
            _, settings = check_world(RANKS, link)
            check_probe(RANKS, probe_seconds)
            if repeat < 1:
                raise ValueError(f"repeat must be at least 1 (got {repeat})")
            work = Work(
                link=settings,
                tasks=tuple(task or TASKS),
                seconds=seconds,
                probe_seconds=probe_seconds,
                repeat=repeat,
            )
            for name in work.tasks:
                check_asked(_asked(work, name))
            found = measure(work)
        if json is not None:
            stored.write(found, json, form=_FORMAT)
        for line in [*summaries(found.cases), "", *table(found.cases), *(f"\nRefused: {why}" for why in found.refused)]:
            print(line)


def _read(path: Path) -> Cases:
    try:
        return stored.read(Cases, path, form=_FORMAT)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path}: expected cases of format {_FORMAT} that --json wrote ({type(error).__name__}: {error}); "
            "measure again"
        ) from error


def summaries(cases: Sequence[Case]) -> list[str]:
    """Return a table in Markdown: how close predictions are, over all cases, each link and each model."""
    if not cases:
        return ["Nothing was predicted."]
    groups = {"all": list(cases)}
    for case in cases:
        groups.setdefault(case.link, []).append(case)
    for case in cases:
        groups.setdefault(f"`{case.task}`", []).append(case)
    lines = [f"| cases | number | {' | '.join(summary(cases))} |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, own in groups.items():
        figures = " | ".join(
            f"{100 * value:.{digits}f} %" for value, digits in zip(summary(own).values(), (1, 0, 0, 0), strict=True)
        )
        lines.append(f"| {name} | {len(own)} | {figures} |")
    for link, disagreement in {case.link: case.disagreement for case in cases}.items():
        is_steady = disagreement <= MOST_DISAGREEMENT
        found = "agreed to 10 %" if is_steady else f"disagreed by up to {100 * disagreement:.0f} %"
        lines += ["", f"Over {link}, two halves of the probe {found}."]
    return lines


def table(cases: Sequence[Case]) -> list[str]:
    """Return a table in Markdown: every case."""
    lines = [
        "| link | model | hook | predicted, ms | measured, ms (quartiles) | error |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for case in cases:
        low, middle, high = np.quantile(case.steps, (0.25, 0.5, 0.75)) * 1e3
        predicted = f"{1e3 * case.predicted:.1f} ± {1e3 * case.uncertainty:.1f}"
        mark = " (recommended)" if case.hook == case.recommended else ""
        lines.append(
            f"| {case.link} | `{case.task}` | `{case.hook}`{mark} | {predicted} | "
            f"{middle:.1f} ({low:.1f} to {high:.1f}) | {100 * case.error:+.0f} % |"
        )
    return lines
