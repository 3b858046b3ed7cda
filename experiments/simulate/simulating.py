"""The simulation of many clusters: every hook, link and number of ranks, and in words what it rests on."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.markup import escape

from commhooks.planning.sizes import BUCKET_BYTES, BYTES_PER_ELEMENT, FORWARD_SHARE, step_of_size
from commhooks.planning.step_time import Step
from commhooks.units import bytes_in_words, counted, seconds_in_words

from ..launch import torchrun_world
from ..links.link import format_rate
from ..machine import machine, versions
from ..report.plots import LIGHT
from ..report.table import plain_table
from ..report.words import listed, percent
from ..runs import Compute
from ..specs import Spec
from .carrier import Carrier
from .measured import Measured
from .measuring import Asked, measure
from .pictures import utilisation_picture
from .point import Point
from .request import DATA, PICTURE, TABLE, Request, check_files, check_request, title_of


@dataclass(frozen=True)
class Simulation:
    """All simulated clusters, and what they rest on."""

    points: tuple[Point, ...]
    assumptions: tuple[str, ...]
    caption: str  # the most important of them, for the picture


def simulate(request: Request, console: Console) -> Simulation:
    """Measure or load what is needed, simulate, print tables and assumptions, and write the files.

    Raises:
        ValueError: What is asked for does not fit together; the message says what does.

    """
    check_request(request)
    check_files(request)
    measured = None
    if request.parameters is None:
        measured = _measurements(request, console)
        if request.save is not None:
            request.save.parent.mkdir(parents=True, exist_ok=True)
            measured.write(request.save)
        found = simulate_measured(request, measured)
    else:
        found = simulate_sizes(request)
    _print(found, console)
    if request.out is not None:
        _write(found, measured, request)
        console.print(f"\ntable, picture and data  {request.out}", highlight=False, soft_wrap=True, markup=False)
    return found


def simulate_measured(request: Request, measured: Measured) -> Simulation:
    """Return the simulation of measured hooks."""
    factor = 1.0
    if request.compute is not None:
        stated = Compute.parse(request.compute)
        factor = stated.factor or (stated.seconds or 0.0) / measured.compute.in_all
    carrier = Carrier.of(request, factor)
    points = _points(
        request, carrier, lambda hook, ranks: measured.step(hook, ranks, cores=request.cores).scaled(factor)
    )  # fmt: skip
    workers = min(measured.hooks[hook.label].most_workers for hook in request.hooks)
    compute = seconds_in_words(factor * measured.compute.in_all)
    caption = (
        f"{measured.task} on {measured.machine['processor']}: compute {compute} a step, "
        f"{counted(request.cores, 'core')} a rank, latency {seconds_in_words(request.links[0].latency)}."
    )
    if max(request.ranks) > workers:
        caption += f" Compression beyond {workers} ranks is extrapolated."
    return Simulation(
        points, (*_said_of(measured, factor, request), carrier.in_words(), *_said_of_links(request)), caption
    )


def simulate_sizes(request: Request) -> Simulation:
    """Return the simulation of a model of which only the number of parameters and the compute are known."""
    assert request.parameters is not None and request.compute is not None, "checked before"
    seconds = Compute.parse(request.compute).seconds
    assert seconds is not None, "checked before"
    carrier = Carrier.of(request)
    points = _points(
        request, carrier, lambda hook, ranks: step_of_size(request.parameters or 0, BYTES_PER_ELEMENT[hook], seconds)
    )
    said = (
        f"{request.parameters:,.0f} parameters and {seconds_in_words(seconds)} of compute are given; nothing was "
        "measured, and the time of compression is not counted.",
        f"Gradients become ready evenly over the last {percent(1 - FORWARD_SHARE)} of compute, in buckets of "
        f"{bytes_in_words(BUCKET_BYTES)} (of fp32); the optimizer's time is part of the compute.",
    )
    caption = (
        f"{request.parameters:,.0f} parameters, compute {seconds_in_words(seconds)} a step, latency "
        f"{seconds_in_words(request.links[0].latency)}; the time of compression is not counted."
    )
    return Simulation(points, (*said, carrier.in_words(), *_said_of_links(request)), caption)


def _measurements(request: Request, console: Console) -> Measured:
    """Return what was measured, now or by an earlier command."""
    if request.measured is None:
        if torchrun_world() is not None:
            raise ValueError("the step is measured in one process: run 'commhooks simulate' without torchrun")
        asked = Asked(
            task=request.task or Spec.parse("gpt:size=base", "task"),
            hooks=request.hooks,
            ranks=request.ranks,
            bucket_cap_mb=request.bucket_cap_mb,
        )
        return measure(asked, partial(console.print, highlight=False, markup=False))
    measured = Measured.read(request.measured)
    missing = [hook.label for hook in request.hooks if hook.label not in measured.hooks]
    if missing:
        raise ValueError(
            f"measured {request.measured}: hook {missing[0]!r} was not measured; there are "
            f"{listed(tuple(measured.hooks))}"
        )
    return measured


def _points(request: Request, carrier: Carrier, step: Callable[[str, int], Step]) -> tuple[Point, ...]:
    return tuple(
        Point(hook.label, ranks, link, carrier.time(step(hook.label, ranks), link, hook.label, ranks))
        for link in request.links
        for hook in request.hooks
        for ranks in request.ranks
    )


def _said_of(measured: Measured, factor: float, request: Request) -> list[str]:
    """Return sentences about what was measured, and what was extrapolated."""
    compute, here = measured.compute, measured.machine
    said = [
        f"{measured.task} ({measured.parameters:,} parameters, {counted(len(compute.buckets), 'bucket')}): compute of "
        f"{seconds_in_words(compute.in_all)} a step and all compression were measured with one thread on "
        f"{here['processor']}, {here['cores']} cores, with a load of {here['load']}.",
        f"Each rank has {counted(request.cores, 'core')}"
        + (": compression delays the backward pass." if request.cores == 1 else ": compression runs beside compute."),
        "Hooks are simulated as in the first steps that were measured; what they do only later, as after start_after "
        "or at the end of a schedule, is not described.",
    ]
    if factor != 1:
        said.append(
            f"Compute and compression are scaled alike, by {factor:.3g}: {seconds_in_words(factor * compute.in_all)} a "
            "step. A processor that is faster at one of them is not described."
        )
    beyond: dict[int, list[str]] = {}
    for label in dict.fromkeys(hook.label for hook in request.hooks):
        times = measured.hooks[label]
        timed = sorted(times.by_workers)
        if between := [f"{n:,}" for n in request.ranks if n < timed[-1] and n not in timed]:
            said.append(
                f"Interpolated: the compression of {label} with {listed(between)} ranks, from that of the nearest of "
                f"{listed([str(workers) for workers in timed])} workers."
            )
        if max(request.ranks) > times.most_workers:
            beyond.setdefault(times.most_workers, []).append(label)
        if uncounted := [f"{ranks:,}" for ranks in request.ranks if ranks > 1 and not times.is_counted(ranks)]:
            said.append(f"Extrapolated: the payloads of {label} for {listed(uncounted)} ranks.")
    for workers, labels in beyond.items():
        said.append(
            f"Extrapolated: the compression of {listed(labels)} beyond the {workers} workers that were timed. It grows "
            "linearly with the bytes of the answers, if more workers have larger answers; otherwise it stays."
        )
    other = {name: number for name, number in versions().items() if measured.versions.get(name) != number}
    if other:
        old = ", ".join(f"{name} {measured.versions.get(name, 'unknown')}" for name in other)
        said.append(f"Note: it was measured with other versions: {old}.")
    return said


def _said_of_links(request: Request) -> list[str]:
    link = request.links[0]
    place = "" if link.hosts_per_site is None else " of a site"
    said = [
        f"Every host has its own link of the stated rate in both directions, with a latency of "
        f"{seconds_in_words(link.latency)} for each message that waits for another one; "
        f"switches{place} have room for all.",
        "Collectives pass the link one after another. "
        + (
            "Bytes and messages are those of Gloo, with the headers of packets."
            if link.algorithm == "gloo"
            else "Only the data of rings is counted, without headers."
        ),
    ]
    if link.ranks_per_host > 1:
        said.append(
            f"{counted(link.ranks_per_host, 'rank')} on each host share its link. Without a fast link inside, they "
            "reach each other through it too; with one, sums are reduced and gathered inside, before and after the "
            "hosts' exchange."
        )
    if link.hosts_per_site is not None:
        said.append(
            f"{counted(link.hosts_per_site, 'host')} of a site share an uplink of {format_rate(link.site_rate)}."
        )
    return [*said, "All ranks are equally fast, and nothing is lost."]


def _print(found: Simulation, console: Console) -> None:
    for link in dict.fromkeys(point.link for point in found.points):
        own = [point for point in found.points if point.link == link]
        hooks = list(dict.fromkeys(point.hook for point in own))
        console.print()
        table = plain_table(f"{title_of(link)}: step time and utilisation", tuple(map(escape, hooks)), first="ranks")
        for ranks in dict.fromkeys(point.ranks for point in own):
            times = [next(p.time for p in own if (p.hook, p.ranks) == (hook, ranks)) for hook in hooks]
            table.add_row(
                f"{ranks:,}", *(f"{seconds_in_words(time.seconds)}  {percent(time.utilisation)}" for time in times)
            )
        console.print(table)
    console.print("\nAssumptions", style="bold")
    for sentence in found.assumptions:
        console.print(f"- {sentence}", highlight=False, markup=False)


def _write(found: Simulation, measured: Measured | None, request: Request) -> None:
    """Write table, picture and data."""
    folder = request.out
    assert folder is not None, "asked for"
    folder.mkdir(parents=True, exist_ok=True)
    rows = rows_of(found.points)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
    )
    (folder / TABLE).write_text(text.getvalue(), encoding="utf-8")
    (folder / PICTURE).write_bytes(utilisation_picture(found.points, found.caption, LIGHT))
    data = {
        "command": request.command,
        "assumptions": found.assumptions,
        "measured": None if measured is None else dataclasses.asdict(measured),
        "versions": versions(),
        "machine": machine(),
    }
    (folder / DATA).write_text(json.dumps(data) + "\n", encoding="utf-8")


def rows_of(points: Sequence[Point]) -> list[dict[str, object]]:
    """Return a row for each cluster: rates in bits per second, times in seconds, bytes sent per rank."""
    return [
        {
            "hook": point.hook,
            "ranks": point.ranks,
            "rate": point.link.rate,
            "ranks_per_host": point.link.ranks_per_host,
            "inner_rate": point.link.inner_rate,
            "utilisation": point.time.utilisation,
            **vars(point.time),
        }
        for point in points
    ]
