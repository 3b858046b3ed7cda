"""Figure 10: gradients that are synchronized every 1, 2, 4 or 8 iterations, with `no_sync()`.

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
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
import torch
import torch.distributed as dist

from commhooks.units import three_digits

from ...launch import Send
from ...links.link import LinkSettings, format_rate, parse_rate
from ...report.plots import Theme, canvases, legend, png, style
from ...specs import Spec
from ...summary import Spread
from ..notes import Notes
from ..reproduction import Block, Picture, Reproduction, Table
from .cells import draw_spreads, milliseconds, percent
from .iterations import Replica, dilation, measure_in_world, timed

RANKS = 2
NEVER = "never"  # the key of iterations that do not synchronize
CLASSES = {"core": "ddp_core", "torch": "PyTorch"}
_NEVER_ITERATIONS = 2  # of a measurement, for less noise
_WARM_UP = 2  # synchronized iterations: PyTorch and ddp_core arrange their buckets anew after the first


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    scenes: tuple[tuple[str, str], ...]  # a task, and the rate of the link
    cycles: tuple[int, ...] = (1, 2, 4, 8)  # iterations of which the last one synchronizes
    turns: int  # higher: steadier medians
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
    for task, rate in settings.scenes:
        link = LinkSettings(kind=settings.kind, bits_per_second=parse_rate(rate)).slowed(slower)
        work = _Work(task, link, tuple(settings.cycles), settings.turns, slower)
        notes.tell(f"{task} at {rate}")
        found = notes.once(f"{task} at {rate}", partial(measure_in_world, _rank, RANKS, work, link, notes))
        scenes.append({"task": task, "rate": rate, **found})
    return {"dilation": slower, "scenes": scenes}


def _rank(rank: int, ranks: int, work: _Work, send: Send) -> None:
    """Time cycles in turns on one rank; rank 0 sends the seconds of an iteration, for each class and cycle."""
    torch.set_num_threads(1)
    group: Any = dist.group.WORLD
    replicas = {name: Replica(Spec.parse(work.task, "task"), name, None, work.link, group) for name in CLASSES}
    for replica in replicas.values():
        for _ in range(_WARM_UP):
            replica.step()
    found: dict[str, dict[str, list[float]]] = {
        name: {key: [] for key in (NEVER, *map(str, work.cycles))} for name in CLASSES
    }
    pairs = [(name, cycle) for cycle in (0, *work.cycles) for name in CLASSES]
    for turn in range(work.turns):
        for name, cycle in pairs if turn % 2 == 0 else reversed(pairs):
            seconds = max(timed(partial(_cycle, replicas[name], cycle))) / (cycle or _NEVER_ITERATIONS)
            replicas[name].forget()
            found[name][str(cycle) if cycle else NEVER].append(seconds / work.dilation)
        if rank == 0:
            send(f"  turn {turn + 1} of {work.turns}")
    parameters = replicas["core"].parameters
    for replica in replicas.values():
        replica.close()
    if rank == 0:
        send({"parameters": parameters, "seconds": found})


def _cycle(replica: Replica, iterations: int) -> None:
    """Run a cycle of so many iterations; 0: some that do not synchronize."""
    replica.accumulate(iterations - 1 if iterations else _NEVER_ITERATIONS)
    if iterations:
        replica.step()


def arithmetic(seconds: Mapping[str, Sequence[float]], cycle: int) -> float:
    """Return compute + exposed / n: the seconds of an iteration in a cycle of n, from those of 1 and of none."""
    compute, every = (statistics.median(seconds[key]) for key in (NEVER, "1"))
    return compute + (every - compute) / cycle


def saved(seconds: Mapping[str, Sequence[float]], cycle: int) -> Spread:
    """Return the share of an iteration's latency that cycles of n save, in each turn."""
    return Spread.of([1 - long / every for long, every in zip(seconds[str(cycle)], seconds["1"], strict=True)])


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return a table for each scene, what was found in it, and the picture."""
    blocks: list[Block] = []
    for scene in measured["scenes"]:
        seconds = scene["seconds"]
        blocks.append(_table(scene, settings))
        for ddp, name in CLASSES.items():
            blocks.append(_finding(f"{_title(scene)}, {name}", seconds[ddp], settings.cycles[-1]))
    caption = (
        "Latency of an iteration against the iterations of a cycle, measured and by arithmetic, in a panel for each"
    )
    return [*blocks, Picture("latency", f"{caption} model and link.", partial(_draw, settings, measured["scenes"]))]


def _title(scene: Mapping[str, Any]) -> str:
    return f"{scene['task']} at {format_rate(parse_rate(scene['rate']))}"


def _table(scene: Mapping[str, Any], settings: Settings) -> Table:
    rows = []
    for ddp, name in CLASSES.items():
        seconds = scene["seconds"][ddp]
        rows += [
            [
                f"{name}, every {cycle}" if cycle > 1 else f"{name}, every iteration",
                milliseconds(Spread.of(seconds[str(cycle)])),
                three_digits(1e3 * arithmetic(seconds, cycle)),
                percent(saved(seconds, cycle)) if cycle > 1 else "",
            ]
            for cycle in settings.cycles
        ]
        rows.append([f"{name}, never", milliseconds(Spread.of(seconds[NEVER])), "", ""])
    title = f"{_title(scene)}: {scene['parameters']:,} parameters, {len(scene['seconds']['core']['1'])} turns"
    columns = ("synchronized", "ms an iteration (quartiles)", "compute + exposed / n, ms", "saved, % (quartiles)")
    return Table(title, columns, rows)


def _finding(what: str, seconds: Mapping[str, Sequence[float]], cycle: int) -> str:
    found, expected = saved(seconds, cycle), 1 - arithmetic(seconds, cycle) / statistics.median(seconds["1"])
    return (
        f"{what}: synchronizing every {cycle} iterations saves {100 * found.median:.0f} % of an iteration's latency "
        f"(quartiles {100 * found.low:.0f} to {100 * found.high:.0f} %); the arithmetic gives {100 * expected:.0f} %."
    )


def _draw(settings: Settings, scenes: Sequence[Mapping[str, Any]], theme: Theme) -> bytes:
    """Draw a panel for each scene, whose latencies differ too much for one axis."""
    with matplotlib.rc_context(style(theme)):
        figure, panels = canvases("", "", 9.6, 3.6, columns=len(scenes))
        for axes, scene in zip(panels, scenes, strict=True):
            axes.set_title(_title(scene), loc="left", fontweight="bold", fontsize=10)
            for (ddp, name), colour, beside in zip(CLASSES.items(), theme.hooks, (0.97, 1.03), strict=False):
                seconds = scene["seconds"][ddp]
                spreads = [Spread.of(seconds[str(cycle)]) for cycle in settings.cycles]
                places = [beside * cycle for cycle in settings.cycles]
                draw_spreads(axes, places, spreads, colour=colour, label=f"{name}, median and quartiles")
                axes.plot(
                    places,
                    [1e3 * arithmetic(seconds, cycle) for cycle in settings.cycles],
                    color=colour,
                    linestyle=":",
                    label=f"{name}, compute + exposed / n",
                )
            axes.set_xscale("log", base=2)
            axes.set_xticks(settings.cycles, [str(cycle) for cycle in settings.cycles])
            axes.set_ylim(bottom=0)
            axes.set_xlabel("iterations of a cycle")
        panels[0].set_ylabel("milliseconds an iteration")
        legend(figure, panels[0], width=9.6)
        return png(figure)


REPRODUCTION = Reproduction(
    name="ddp-figure-10",
    title="Synchronize every 1, 2, 4 or 8 iterations",
    source="PyTorch DDP paper (Li et al., VLDB 2020), figure 10",
    said=(
        "The fewer iterations synchronize, the lower the average latency of an iteration.",
        "With 8 iterations to a cycle it falls by about 38 % with NCCL and 57 % with Gloo (recalled).",
    ),
    sizes={
        "default": Settings(
            scenes=(
                ("digits:network=resnet18", "1Gbit/s"),
                ("gpt:size=base", "1Gbit/s"),
                ("gpt:size=base", "100Mbit/s"),
            ),
            turns=5,
        ),
        "tiny": Settings(scenes=(("gpt:size=tiny", "100Mbit/s"),), turns=2, kind="emulated"),
    },
    measure=measure,
    show=show,
)
