"""How the latency of an iteration falls if gradients are synchronized every 1, 2, 4 or 8 iterations, with `no_sync()`.

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

import matplotlib
import torch
import torch.distributed as dist

from commhooks.units import three_digits
from experiments.launch import Send
from experiments.links.link import LinkSettings, parse_rate
from experiments.machine import dilation
from experiments.planning.overlap import longest
from experiments.report.plots import Theme, canvases, legend, png, style
from experiments.results.medians import Ratio, milliseconds

from ..notes import Notes
from ..reproduction import NONE, Block, Picture, Reproduction, Table
from .iterations import Replica, draw_quartiles, label_axes, measure_in_world
from .turns import DDPS, MODELS, TINY_MODELS

RANKS = 2
NEVER = "never"  # the key of iterations that do not synchronize
_NEVER_ITERATIONS = 2  # of a measurement, for less noise


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    scenes: tuple[tuple[str, str], ...]  # a model, and the rate of the link
    models: Mapping[str, str] = field(default_factory=lambda: dict(MODELS))
    cycles: tuple[int, ...] = (1, 2, 4, 8)  # iterations of which the last one synchronizes
    turns: int  # higher: narrower intervals; from 6 on they are finite
    kind: str = "hosts"


@dataclass(frozen=True)
class _Work:
    """What the ranks are told."""

    task: str
    link: LinkSettings
    cycles: tuple[int, ...]
    turns: int
    dilation: float


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Measure every scene."""
    slower = dilation(RANKS)
    scenes = []
    for model, rate in settings.scenes:
        link = LinkSettings(kind=settings.kind, bits_per_second=parse_rate(rate)).slowed(slower)
        work = _Work(settings.models[model], link, tuple(settings.cycles), settings.turns, slower)
        notes.tell(f"{model} at {rate}")
        found = notes.once(f"{model} at {rate}", partial(measure_in_world, _rank, RANKS, work, link, notes))
        scenes.append({"model": model, "rate": rate, **found})
    return {"dilation": slower, "scenes": scenes}


def _rank(rank: int, ranks: int, work: _Work, send: Send) -> None:
    """Time cycles in turns on one rank; rank 0 sends the seconds of an iteration, for each class and cycle."""
    torch.set_num_threads(1)
    if rank == 0:
        send("  the ranks have started")
    group = dist.group.WORLD
    assert group is not None, "run_world has made the default group"
    replicas = {ddp: Replica(work.task, ddp, None, work.link, group) for ddp in DDPS}
    for replica in replicas.values():
        replica.warm_up()
    found: dict[str, dict[str, list[float]]] = {
        ddp: {key: [] for key in (NEVER, *map(str, work.cycles))} for ddp in DDPS
    }
    pairs = [(ddp, cycle) for cycle in (0, *work.cycles) for ddp in DDPS]
    for turn in range(work.turns):
        for ddp, cycle in pairs if turn % 2 == 0 else reversed(pairs):
            seconds = longest(partial(_cycle, replicas[ddp], cycle)) / (cycle or _NEVER_ITERATIONS)
            replicas[ddp].forget()
            found[ddp][str(cycle) if cycle else NEVER].append(seconds / work.dilation)
        if rank == 0:
            send(f"  turn {turn + 1} of {work.turns}")
    if rank == 0:
        send({"parameters": replicas["core"].parameters, "seconds": found})
    for replica in replicas.values():
        replica.close()


def _cycle(replica: Replica, iterations: int) -> None:
    """Run a cycle of so many iterations; 0: some that do not synchronize."""
    replica.accumulate(iterations - 1 if iterations else _NEVER_ITERATIONS)
    if iterations:
        replica.step()


def arithmetic(seconds: Mapping[str, Sequence[float]], cycle: int) -> float:
    """Return compute + exposed / n: the seconds of an iteration in a cycle of n, from those of 1 and of none."""
    compute, every = (statistics.median(seconds[key]) for key in (NEVER, "1"))
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
                Ratio.of(seconds[str(cycle)], seconds["1"]).saved if cycle > 1 else NONE,
            ]
            for cycle in settings.cycles
        ]
        rows.append([f"{name}, never", milliseconds(seconds[NEVER]), NONE, NONE])
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


def _draw(settings: Settings, scenes: Sequence[Mapping[str, Any]], theme: Theme) -> bytes:
    """Draw a panel for each scene, whose latencies differ too much for one axis."""
    with matplotlib.rc_context(style(theme)):
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
        return png(figure)


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
