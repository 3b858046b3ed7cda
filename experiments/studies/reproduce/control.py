"""A link that goes from 1 Gbit/s to 100 Mbit/s and back: a controller beside every fixed compressor.

Every run has two ranks, each on a host of its own (a network namespace). The rate of both links changes while a step is
under way. A fixed compressor needs fewer steps than the controller: its steps are alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from commhooks.experiments.report.plots import Theme, canvas, legend, looks
from commhooks.experiments.report.words import NEVER, percent
from commhooks.experiments.specs import Spec
from commhooks.units import seconds_in_words, three_digits
from experiments.studies.blocks import Block, Picture, Table
from experiments.studies.medians import Ratio, milliseconds
from experiments.studies.ranks import on_ranks
from experiments.studies.reproduce.control_ranks import Settings, run_phases, run_turns
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.results import Reproduction

T = TypeVar("T")

_RANKS = 2
_CONTROLLER = "controller"
_THROUGHPUT_TARGET, _STEPS_TARGET, _SLOWER_TARGET = 0.90, 10, 0.03
_MET = {True: "met", False: "missed"}


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return the runs of all compressors and of the controller, and the turns without a limit."""
    fixed: dict[str, Any] = {}
    for hook in settings.candidates:
        fixed[hook] = notes.once(hook, lambda hook=hook: _run(settings, Spec.parse(hook), notes))  # type: ignore[misc]  # 'Cannot infer type of lambda'
    controlled = [
        notes.once(f"{_CONTROLLER} {number}", lambda: _run(settings, None, notes)) for number in range(settings.runs)
    ]
    return {"fixed": fixed, "controlled": controlled, "beside": notes.once("beside", lambda: _turns(settings, notes))}


def _run(settings: Settings, fixed: Spec | None, notes: Notes) -> dict[str, Any]:
    """Return one run over the changing link."""
    ran = on_ranks(partial(run_phases, settings, fixed), _RANKS, notes.tell, link=settings.link)
    medians = ", ".join(seconds_in_words(statistics.median(phase)) for phase in _by_phase(ran.seconds, settings))
    notes.tell(f"{_CONTROLLER if fixed is None else fixed.label}: {medians} a step in the phases")
    return asdict(ran)


def _turns(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return the controller's turns beside a plain all-reduce's, on links without a limit."""
    beside = on_ranks(partial(run_turns, settings), _RANKS, notes.tell, link=settings.link)
    notes.tell(f"without a limit the controller chose {beside.chosen}")
    return asdict(beside)


def _by_phase(of_steps: list[T], settings: Settings) -> list[list[T]]:
    each = len(of_steps) // len(settings.rates)
    return [of_steps[first : first + each] for first in range(0, each * len(settings.rates), each)]


def _means(ran: Mapping[str, Any], settings: Settings) -> list[float]:
    """Return the mean seconds of a step in each phase."""
    return [statistics.fmean(phase) for phase in _by_phase(ran["seconds"], settings)]


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return the phases of all runs, the moves, and what the controller costs."""
    fixed = {
        hook: [statistics.fmean(p) for p in _by_phase(ran["seconds"], settings)]
        for hook, ran in measured["fixed"].items()
    }
    best = [min(fixed, key=lambda hook: fixed[hook][phase]) for phase in range(len(settings.rates))]
    controlled = measured["controlled"]
    columns = ["compressor", *(f"{rate}, ms a step" for rate in settings.rates)]
    rows = [[hook, *(three_digits(1e3 * seconds) for seconds in phases)] for hook, phases in fixed.items()]
    shares: list[list[float]] = []
    for number, ran in enumerate(controlled, 1):
        means = _means(ran, settings)
        shares.append([fixed[hook][phase] / means[phase] for phase, hook in enumerate(best)])
        rows.append([f"controller, run {number}", *(three_digits(1e3 * seconds) for seconds in means)])
        rows.append(["its throughput over the best's", *map(percent, shares[-1])])
    moves = [
        [f"{number}", f"{step}", f"`{source}`", f"`{target}`", reason]
        for number, ran in enumerate(controlled, 1)
        for step, source, target, reason in ran["decisions"]
    ]
    return [
        Table("Mean step in each phase", columns, rows),
        _verdict(settings, fixed, best, shares, controlled),
        Picture(
            "steps",
            "Step time over steps: every fixed compressor's mean in each phase, and each step of the controller",
            partial(_draw_steps, controlled[0], fixed, settings.rates, settings.steps),
        ),
        Table("The controller's moves", ["run", "step", "from", "to", "reason"], moves or [[NEVER] * 5]),
        _replacing(controlled),
        _beside(measured["beside"], settings),
    ]


def _verdict(
    settings: Settings,
    fixed: Mapping[str, list[float]],
    best: list[str],
    shares: list[list[float]],
    controlled: list[Any],
) -> str:
    lowest = min(min(one) for one in shares)
    delays = [delay for ran in controlled for delay in _delays(ran, fixed, settings)]
    slowest = max(delays, default=0)
    equal = all(ran["equal"] for ran in controlled)
    bests = ", ".join(f"{hook} at {rate}" for hook, rate in zip(best, settings.rates, strict=True))
    return (
        f"Best fixed compressors: {bests}. The controller reaches at least {percent(lowest)} of their throughput in "
        f"every phase of every run (goal: {percent(_THROUGHPUT_TARGET)}, {_MET[lowest >= _THROUGHPUT_TARGET]}); the "
        "first phase includes the steps of trying candidates. After a change of the link it used a compressor "
        f"that, fixed, has {percent(_THROUGHPUT_TARGET)} of the best one's throughput within {slowest} steps (goal: "
        f"{_STEPS_TARGET}, {_MET[slowest <= _STEPS_TARGET]}). After every phase the replicas "
        f"were {'equal' if equal else 'not equal'}, bit for bit."
    )


def _delays(ran: Mapping[str, Any], fixed: Mapping[str, list[float]], settings: Settings) -> list[int]:
    """Return for each change of the link after how many steps a compressor was in use that is good enough on it."""
    found = []
    for phase, rungs in list(enumerate(_by_phase(ran["rungs"], settings)))[1:]:
        best = min(seconds[phase] for seconds in fixed.values())
        good = [step for step, rung in enumerate(rungs) if _THROUGHPUT_TARGET * fixed[rung][phase] <= best]
        found.append(good[0] if good else len(rungs))
    return found


def _replacing(controlled: list[Any]) -> str:
    seconds = [one for ran in controlled for one in ran["replacing"]]
    return (
        f"A call of the controller that moves takes {milliseconds(seconds)} ms, with the probe and the ranks' "
        "agreement (median and quartiles)."
    )


def _beside(beside: Mapping[str, Any], settings: Settings) -> str:
    ours, itself = Ratio.of(beside["adaptive"], beside["dense"]), Ratio.of(beside["again"], beside["dense"])
    is_met = ours.median <= 1 + _SLOWER_TARGET + max(0.0, itself.high - 1)
    at_first = beside["at_first"]
    as_long_as = sum(at_first) / (statistics.fmean(beside["dense"]) / settings.turn_steps)
    return (
        f"On links without a limit the controller chose {beside['chosen']}. Its steps took {ours.text} times those of "
        f"a plain all-reduce, in {settings.turns} turns of {settings.turn_steps} steps (median, 95 % interval); those "
        f"of a second plain all-reduce {itself.text} times. The goal of at most {percent(_SLOWER_TARGET)} more, plus "
        f"that spread, is {_MET[is_met]}. Its first {len(at_first)} steps, of trying candidates, are not "
        f"counted; they took {seconds_in_words(sum(at_first))}, as long as {as_long_as:.0f} steps of a plain "
        "all-reduce."
    )


def _draw_steps(
    controlled: Mapping[str, Any], fixed: Mapping[str, Sequence[float]], rates: Sequence[str], steps: int, theme: Theme
) -> Figure:
    """Draw a dot for each step of the controller, in the colour of its compressor; a line for each fixed one.

    Args:
        controlled: The run of the controller: seconds and rung of each step.
        fixed: Each fixed compressor's mean step in each phase.
        rates: Of the phases.
        steps: Of a phase.
        theme: The colours.

    """
    hooks = list(fixed)
    drawn = looks(hooks, "all-reduce" if "all-reduce" in hooks else None)
    figure, axes = canvas("Steps on a link that changes", "step", 7.2, 4.2)
    for hook, means in fixed.items():
        for phase, seconds in enumerate(means):
            ends = [phase * steps, (phase + 1) * steps]
            axes.plot(ends, [1e3 * seconds] * 2, color=drawn[hook].colour, linewidth=1.0, linestyle=(0, (4, 2)))
    numbered = list(enumerate(zip(controlled["seconds"], controlled["rungs"], strict=True)))
    for hook, group in groupby(numbered, key=lambda one: one[1][1]):
        own = list(group)
        axes.plot(
            [number for number, _ in own], [1e3 * seconds for _, (seconds, _) in own],
            color=drawn[hook].colour, marker="o", markersize=2.5, linewidth=0.8, zorder=3,
        )  # fmt: skip
    for hook in hooks:  # only for the legend
        axes.plot([], [], color=drawn[hook].colour, marker="o", markersize=3, label=drawn[hook].label)
    axes.plot([], [], color=theme.ink, linewidth=1.0, linestyle=(0, (4, 2)), label="fixed: mean of the phase")
    for phase, rate in enumerate(rates):
        axes.axvline(phase * steps, color=theme.ink, linewidth=0.6)
        axes.annotate(
            rate, (phase * steps, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
            textcoords="offset points", va="top", zorder=4,
            bbox={"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylabel("step, ms (logarithmic)")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0, steps * len(rates))
    legend(figure, axes)
    return figure


REPRODUCTION = Reproduction(
    name="control-link",
    title="A controller on a link that changes",
    source="This project: `commhooks.control.Adaptive`",
    said=(
        "A controller between steps follows a link that goes from 1 Gbit/s to 100 Mbit/s and back (guide, control).",
        "Its goals: the new setting within 10 steps; at least 90 % of the best fixed compressor's throughput over each "
        "phase of 100 steps; on a fast link at most 3 % slower than a plain all-reduce; replicas equal bit for bit.",
    ),
    sizes={
        "default": Settings(),
        "tiny": Settings(
            limited=False, rates=("100Mbit/s", "10Mbit/s"), steps=5, fixed_steps=2, runs=1, candidates=("all-reduce",
            "powersgd:rank=1"), task="gpt:size=tiny", bucket_cap_mb=1.0, turns=1, turn_steps=2,
        ),
    },
    measure=measure,
    show=show,
)  # fmt: skip
