"""The growth of an iteration's latency with the number of hosts.

All ranks run all the time. For a world size of W they form groups of W, each of which trains a model of its own: with
8 hosts, a world size of 2 is four pairs. So while all compute, a rank has the same share of the processor at every
world size, and the world sizes take turns in the same processes. A group's latency is that of its slowest rank; a
turn's is the mean over its groups.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor
from torch.futures import Future

from commhooks.experiments.launch import Tell
from commhooks.experiments.links.link import LinkSettings, parse_latency, parse_rate
from commhooks.experiments.machine import dilation
from commhooks.experiments.report.plots import Theme, canvases, legend
from commhooks.experiments.report.words import listed
from commhooks.experiments.timing.link import Link
from commhooks.experiments.timing.step_time import Bucket, Stage, Step, step_time
from commhooks.experiments.training.stepper import Stepper
from commhooks.tensors import tensor_bytes
from commhooks.units import counted, three_digits
from ddp_core import GradBucket
from experiments.studies.blocks import Block, Picture, Table
from experiments.studies.medians import Ratio, milliseconds
from experiments.studies.ranks import on_ranks, same_step
from experiments.studies.reproduce.ddp.turns import (
    MODELS,
    TINY_MODELS,
    draw_quartiles,
    end_groups,
    label_axes,
    over,
    warm_up,
)
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction
from experiments.studies.turns import as_given, turns_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings: models, and the numbers of hosts that are measured and simulated."""

    models: Mapping[str, str] = field(default_factory=lambda: dict(MODELS))
    worlds: tuple[int, ...]  # numbers of hosts; each must divide the last one
    simulated: tuple[int, ...]
    latencies: tuple[str, ...] = ("0", "0.1ms")  # of the simulated link, for each message that waits for another
    base: int = 2  # hosts with which the others are compared
    rate: str = "1 Gbit/s"
    bucket_mib: float = 5.0  # about what the paper found best with Gloo
    turns: int  # higher: narrower intervals; from 6 on they are finite
    kind: str = "hosts"


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Measure every model."""
    ranks = settings.worlds[-1]
    slower = dilation(ranks)
    link = LinkSettings(kind=settings.kind, bits_per_second=parse_rate(settings.rate)).slowed(slower)
    found = {}
    for model, task in settings.models.items():
        notes.tell(f"{model} on {ranks} ranks")
        ask = partial(_time_worlds, settings, task, link, slower)
        found[model] = notes.once(model, partial(on_ranks, ask, ranks, notes.tell, link=link))
    return {"dilation": slower, "models": found}


def _time_worlds(settings: Settings, task: str, link: LinkSettings, slower: float, tell: Tell) -> dict[str, Any]:
    """Time iterations of groups in turns on one rank; return their seconds for each world size."""
    subgroups = [dist.new_subgroups(world)[0] for world in settings.worlds]
    groups = over(link, [group for group in subgroups if group is not None])
    steppers = {
        world: same_step(task, "core", settings.bucket_mib, group)
        for world, group in zip(settings.worlds, groups, strict=True)
    }
    alone: list[tuple[float, int]] = []  # when the buckets of a model in a group of one were ready, and their bytes
    steppers[1].ddp.register_comm_hook(alone, _note_bucket)
    for world, stepper in steppers.items():
        warm_up(stepper)
        tell(f"  the models of groups of {world} are in place")
    contenders = {world: partial(_iteration, stepper, alone, world) for world, stepper in steppers.items()}
    taken = turns_of(contenders, settings.turns, order=as_given, tell=tell)
    found = {
        "parameters": steppers[1].parameters,
        "seconds": {str(world): [seconds / slower for seconds, _ in turns] for world, turns in taken.items()},
        "ready": [[moment / slower for moment, _ in noted] for _, noted in taken[1]],
        "bucket_bytes": [size for _, size in taken[1][-1][1]],
    }
    for stepper in steppers.values():
        stepper.close()
    end_groups(groups)
    return found


def _note_bucket(ready: list[tuple[float, int]], bucket: GradBucket) -> Future[Tensor]:
    """Note when a bucket is ready, and its bytes; return it as its own mean."""
    ready.append((time.perf_counter(), tensor_bytes(bucket.buffer())))
    mean: Future[Tensor] = Future()
    mean.set_result(bucket.buffer())
    return mean


def _iteration(stepper: Stepper, alone: list[tuple[float, int]], world: int) -> tuple[float, list[tuple[float, int]]]:
    """Return the seconds of an iteration, the mean over groups of its slowest rank's, and what `alone` noted in it."""
    dist.barrier()
    alone.clear()
    begun = time.perf_counter()
    stepper()
    own = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    slowest = [max(everyone[first : first + world]).item() for first in range(0, len(everyone), world)]
    return statistics.fmean(slowest), [(moment - begun, size) for moment, size in alone]


def longer(found: Mapping[str, Any], world: int, than: int) -> Ratio:
    """Return the time of an iteration on `world` hosts over its time on `than` hosts, in each turn."""
    return Ratio.of(found["seconds"][str(world)], found["seconds"][str(than)])


def simulated(settings: Settings, found: Mapping[str, Any], world: int, latency: str = "0") -> float:
    """Return an iteration's seconds on `world` hosts by the step-time model, from the measurements of groups of one."""
    ready = [statistics.median(moments) for moments in zip(*found["ready"], strict=True)]
    alone = statistics.median(found["seconds"]["1"])
    buckets = tuple(
        Bucket(moment, (Stage(0.0, (("all-reduce", size),)),))
        for moment, size in zip(ready, found["bucket_bytes"], strict=True)
    )
    step = Step(compute=ready[-1], optimizer=max(0.0, alone - ready[-1]), buckets=buckets)
    link = Link(rate=parse_rate(settings.rate) or math.inf, latency=parse_latency(latency))
    return step_time(step, link, world).seconds


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return tables of what was measured and simulated for each model, what was found, and the picture."""
    models = measured["models"]
    blocks: list[Block] = []
    for model, found in models.items():
        blocks += [_table(settings, model, found), _finding(settings, model, found)]
    blocks.append(_simulated(settings, models))
    blocks += [_simulated_finding(settings, model, found) for model, found in models.items()]
    caption = f"Latency of an iteration against the number of hosts at {settings.rate}, measured and simulated"
    return [*blocks, Picture("latency", caption, partial(_draw, settings, models))]


def _table(settings: Settings, model: str, found: Mapping[str, Any]) -> Table:
    rows = [
        [
            str(world),
            three_digits(2 * (world - 1) / world * sum(found["bucket_bytes"]) / 1e6),
            milliseconds(found["seconds"][str(world)]),
            longer(found, world, settings.base).text if world != settings.base else "1",
            three_digits(1e3 * simulated(settings, found, world)),
        ]
        for world in settings.worlds
    ]
    title = f"{model} at {settings.rate}: {found['parameters']:,} parameters, {settings.turns} turns"
    against = f"times {counted(settings.base, 'host')} (95 %)"
    return Table(title, ("hosts", "MB sent by each", "ms an iteration (quartiles)", against, "simulated, ms"), rows)


def _finding(settings: Settings, model: str, found: Mapping[str, Any]) -> str:
    most = settings.worlds[-1]
    errors = {
        world: simulated(settings, found, world) / statistics.median(found["seconds"][str(world)]) - 1
        for world in settings.worlds
        if world > 1
    }
    off = listed([f"{100 * error:+.0f} % on {world}" for world, error in errors.items()])
    ratio = longer(found, most, settings.base)
    seen = "an iteration takes" if ratio.sign else "no difference seen: an iteration takes"
    return (
        f"{model}: {seen} {ratio.text} times as long on {most} hosts as on {settings.base} (95 % interval over turns). "
        f"The simulated time differs from the measured median by {off}."
    )


def _simulated(settings: Settings, models: Mapping[str, Mapping[str, Any]]) -> Table:
    pairs = [(model, latency) for model in models for latency in settings.latencies]
    rows = [
        [
            str(world),
            *(three_digits(1e3 * simulated(settings, models[model], world, latency)) for model, latency in pairs),
        ]
        for world in settings.simulated
    ]
    columns = ("hosts", *(f"{model}, {latency} latency" for model, latency in pairs))
    return Table(f"Simulated at {settings.rate}, not measured: ms an iteration", columns, rows)


def _simulated_finding(settings: Settings, model: str, found: Mapping[str, Any]) -> str:
    fewest, most = settings.worlds[-1], settings.simulated[-1]
    factors = []
    for latency in settings.latencies:
        few, many = (simulated(settings, found, world, latency) for world in (fewest, most))
        factors.append(f"{many / few:.2f} {_latency(latency)}")
    return f"{model}: from {fewest} to {most} hosts the simulated time grows by a factor of {listed(factors)}."


def _latency(latency: str) -> str:
    seconds = parse_latency(latency)
    return f"with {1e3 * seconds:g} ms of latency" if seconds else "without latency"


def _draw(settings: Settings, models: Mapping[str, Mapping[str, Any]], theme: Theme) -> Figure:
    """Draw a panel for each model: what was measured as medians and quartiles, what was simulated as lines."""
    worlds = [*settings.worlds, *settings.simulated]
    figure, panels = canvases("", "", 9.6, 3.8, columns=len(models))
    for axes, (model, found) in zip(panels, models.items(), strict=True):
        for latency, dashes in zip(settings.latencies, ("-", ":"), strict=True):
            expected = [1e3 * simulated(settings, found, world, latency) for world in worlds]
            words = _latency(latency)
            axes.plot(worlds, expected, color=theme.hooks[1], linestyle=dashes, label=f"simulated, {words}")
        seconds = [found["seconds"][str(world)] for world in settings.worlds]
        draw_quartiles(axes, settings.worlds, seconds, colour=theme.hooks[0], label="measured, median and quartiles")
        label_axes(axes, f"{model} at {settings.rate}", "hosts", worlds)
    panels[0].set_ylabel("milliseconds an iteration")
    legend(figure, panels[0], width=9.6)
    return figure


REPRODUCTION = Reproduction(
    name="ddp-figure-9",
    title="The latency of an iteration from 1 to 256 hosts",
    source="PyTorch DDP paper (Li et al., VLDB 2020), figure 9",
    said=(
        "From 1 to 256 GPUs the latency of an iteration grows, and mildly: throughput scales near-linearly (recalled).",
        "With Gloo it grows more than with NCCL (recalled).",
    ),
    sizes={
        "default": Settings(
            worlds=(1, 2, 4, 8),
            simulated=(16, 32, 64, 128, 256),
            turns=7,
        ),
        "tiny": Settings(
            models={"GPT": TINY_MODELS["GPT"]}, worlds=(1, 2), simulated=(4, 8), base=1, turns=2, kind="emulated"
        ),
    },
    measure=measure,
    show=show,
)
