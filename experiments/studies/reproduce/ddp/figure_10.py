"""The latency of an iteration if gradients are synchronized every 1, 2, 4 or 8 iterations, with `no_sync()`.

Two ranks train on links of a real rate, with ddp_core's class and with PyTorch's. A turn measures a whole cycle of each
length with each class: iterations under `no_sync()`, then one that synchronizes, and the optimizer's step. A cycle's
latency is the slower rank's time over the number of iterations. The turn also measures iterations that never
synchronize; from these and from cycles of one follows the arithmetic, compute + exposed / n, with which cycles of n are
compared. "Exposed" is all that synchronizing adds to an iteration: communication that the backward pass does not hide,
and the optimizer's step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from commhooks.experiments.launch import Tell
from commhooks.experiments.links.link import LinkSettings, parse_rate
from commhooks.experiments.machine import dilation
from commhooks.experiments.report.plots import Theme, canvases, legend
from commhooks.experiments.report.words import NEVER
from commhooks.experiments.training.stepper import Stepper
from commhooks.units import three_digits
from experiments.studies.blocks import Block, Picture, Table
from experiments.studies.medians import Ratio, milliseconds
from experiments.studies.ranks import on_ranks, same_step
from experiments.studies.reproduce.ddp.turns import (
    DDPS,
    MODELS,
    TINY_MODELS,
    draw_quartiles,
    end_groups,
    groups_on,
    label_axes,
    warm_up,
)
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction
from experiments.studies.turns import forth_and_back, in_turns

RANKS = 2
UNSYNCHRONIZED = "never"  # the key of iterations that do not synchronize
_UNSYNCHRONIZED_ITERATIONS = 2  # of a measurement, for less noise


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the measurement."""

    scenes: tuple[tuple[str, str], ...]  # a model, and the rate of the link
    models: Mapping[str, str] = field(default_factory=lambda: dict(MODELS))
    cycles: tuple[int, ...] = (1, 2, 4, 8)  # iterations of which the last one synchronizes
    turns: int  # higher: narrower intervals; from 6 on they are finite
    kind: str = "hosts"


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Measure every scene."""
    slower = dilation(RANKS)
    scenes = []
    for model, rate in settings.scenes:
        link = LinkSettings(kind=settings.kind, bits_per_second=parse_rate(rate)).slowed(slower)
        notes.tell(f"{model} at {rate}")
        ask = partial(_time_cycles, settings, settings.models[model], link, slower)
        found = notes.once(f"{model} at {rate}", partial(on_ranks, ask, RANKS, notes.tell, link=link))
        scenes.append({"model": model, "rate": rate, **found})
    return {"dilation": slower, "scenes": scenes}


def _time_cycles(settings: Settings, task: str, link: LinkSettings, slower: float, tell: Tell) -> dict[str, Any]:
    """Time cycles in turns on one rank; return the seconds of an iteration, for each class and cycle."""
    groups = groups_on(link)
    steppers = {ddp: same_step(task, ddp, group=groups[0]) for ddp in DDPS}
    for stepper in steppers.values():
        warm_up(stepper)
    pairs = [(ddp, cycle) for cycle in (0, *settings.cycles) for ddp in DDPS]
    taken = in_turns(
        {(ddp, cycle): partial(_cycle, steppers[ddp], cycle) for ddp, cycle in pairs},
        settings.turns,
        warm_up=0,
        prepare=lambda pair: steppers[pair[0]].optimizer.zero_grad(),
        order=forth_and_back,
        tell=tell,
    )
    found: dict[str, dict[str, list[float]]] = {ddp: {} for ddp in DDPS}
    for (ddp, cycle), seconds in taken.items():
        each = slower * (cycle or _UNSYNCHRONIZED_ITERATIONS)
        found[ddp][str(cycle) if cycle else UNSYNCHRONIZED] = [one / each for one in seconds]
    parameters = steppers["core"].parameters
    for stepper in steppers.values():
        stepper.close()
    end_groups(groups)
    return {"parameters": parameters, "seconds": found}


def _cycle(stepper: Stepper, iterations: int) -> None:
    """Run a cycle of `iterations`, of which the last one synchronizes; 0: some that do not synchronize."""
    with stepper.ddp.no_sync():
        for _ in range(iterations - 1 if iterations else _UNSYNCHRONIZED_ITERATIONS):
            stepper.backward()
    if iterations:
        stepper()


def arithmetic(seconds: Mapping[str, Sequence[float]], cycle: int) -> float:
    """Return compute + exposed / n: the seconds of an iteration in a cycle of n, from the cycles 1 and 0."""
    compute, every = (statistics.median(seconds[key]) for key in (UNSYNCHRONIZED, "1"))
    return compute + (every - compute) / cycle


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return a table for each scene, what was found in it, and the picture."""
    blocks: list[Block] = []
    for scene in measured["scenes"]:
        blocks.append(_table(scene, settings))
        title = _title(scene)
        for ddp, name in DDPS.items():
            blocks.append(_finding(f"{title}, {name}", scene["seconds"][ddp], settings.cycles[-1]))
    caption = "Latency of an iteration against the iterations of a cycle, measured and by arithmetic"
    return [*blocks, Picture("latency", caption, partial(_draw, settings, measured["scenes"]))]


def _title(scene: Mapping[str, Any]) -> str:
    return f"{scene['model']} at {scene['rate']}"


def _table(scene: Mapping[str, Any], settings: Settings) -> Table:
    rows = []
    for ddp, name in DDPS.items():
        seconds = scene["seconds"][ddp]
        rows += [
            [
                f"{name}, every {cycle}" if cycle > 1 else f"{name}, every iteration",
                milliseconds(seconds[str(cycle)]),
                three_digits(1e3 * arithmetic(seconds, cycle)),
                Ratio.of(seconds[str(cycle)], seconds["1"]).saved if cycle > 1 else NEVER,
            ]
            for cycle in settings.cycles
        ]
        rows.append([f"{name}, never", milliseconds(seconds[UNSYNCHRONIZED]), NEVER, NEVER])
    title = f"{_title(scene)}: {scene['parameters']:,} parameters, {settings.turns} turns"
    columns = ("synchronized", "ms an iteration (quartiles)", "compute + exposed / n, ms", "saved (95 %)")
    return Table(title, columns, rows)


def _finding(what: str, seconds: Mapping[str, Sequence[float]], cycle: int) -> str:
    ratio = Ratio.of(seconds[str(cycle)], seconds["1"])
    expected = arithmetic(seconds, cycle) / statistics.median(seconds["1"])
    if ratio.sign < 0:
        return (
            f"{what}: synchronizing every {cycle} iterations saves {ratio.saved} of an iteration's latency (95 % "
            f"interval over turns); the arithmetic gives {100 * (1 - expected):.0f} %."
        )
    seen = "takes longer" if ratio.sign else "no difference seen"
    return (
        f"{what}: {seen} if only every {cycle}th iteration synchronizes: {ratio.text} of the latency (95 % interval "
        f"over turns); the arithmetic gives {expected:.2f}."
    )


def _draw(settings: Settings, scenes: Sequence[Mapping[str, Any]], theme: Theme) -> Figure:
    """Draw a panel for each scene, whose latencies differ too much for one axis."""
    figure, panels = canvases("", "", 9.6, 3.6, columns=len(scenes))
    for axes, scene in zip(panels, scenes, strict=True):
        for (ddp, name), colour, beside in zip(DDPS.items(), theme.hooks, (0.97, 1.03), strict=False):
            seconds = scene["seconds"][ddp]
            places = [beside * cycle for cycle in settings.cycles]
            of_cycles = [seconds[str(cycle)] for cycle in settings.cycles]
            draw_quartiles(axes, places, of_cycles, colour=colour, label=f"{name}, median and quartiles")
            expected = [1e3 * arithmetic(seconds, cycle) for cycle in settings.cycles]
            axes.plot(places, expected, color=colour, linestyle=":", label=f"{name}, compute + exposed / n")
        label_axes(axes, _title(scene), "iterations of a cycle", settings.cycles)
    panels[0].set_ylabel("milliseconds an iteration")
    legend(figure, panels[0], width=9.6)
    return figure


REPRODUCTION = Reproduction(
    name="ddp-figure-10",
    title="Synchronizing every 1, 2, 4 or 8 iterations",
    source="PyTorch DDP paper (Li et al., VLDB 2020), figure 10",
    said=(
        "The fewer iterations synchronize, the lower the average latency of an iteration.",
        "With 8 iterations to a cycle it falls by about 38 % with NCCL and 57 % with Gloo (recalled).",
    ),
    sizes={
        "default": Settings(
            scenes=(("ResNet-18", "1 Gbit/s"), ("GPT", "1 Gbit/s"), ("GPT", "100 Mbit/s")),
            turns=6,
        ),
        "tiny": Settings(scenes=(("GPT", "100 Mbit/s"),), models=TINY_MODELS, turns=2, kind="emulated"),
    },
    measure=measure,
    show=show,
)
