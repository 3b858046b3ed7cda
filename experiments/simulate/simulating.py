"""The simulation of many clusters: every hook, link and number of ranks, and its assumptions in words."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from commhooks.units import bytes_in_words, counted, seconds_in_words, three_digits

from ..launch import torchrun_world
from ..links.link import format_rate
from ..machine import machine, versions
from ..predicting import stored
from ..predicting.candidates import DENSE, NOOP, label_in_profile
from ..predicting.costs import Backend, Costs, HookCosts, copy_seconds
from ..predicting.estimates import MATRIX
from ..predicting.link import Link
from ..predicting.predicting import Unlinked
from ..predicting.profiles import Profile
from ..predicting.seldom import round_time
from ..predicting.series import Series
from ..predicting.sharded import PLAIN
from ..predicting.sharded_profile import sharded_step_of
from ..predicting.sizes import BUCKET_BYTES, FIRST_BUCKET_BYTES, FORWARD_SHARE, square_matrices
from ..predicting.step_time import StepTime
from ..predicting.tables import Stated
from ..report.plots import LIGHT
from ..report.table import plain_table
from ..report.words import listed, percent
from ..runs import Compute
from ..seldom import Seldom, exchanged
from ..specs import Spec, is_seldom
from .measuring import Asked, measure, read_series, write_series
from .pictures import utilisation_picture
from .point import Point
from .request import DATA, PICTURE, TABLE, Request, check_files, check_request, title_of

_NOISE = 0.03  # of a step: what may differ between two medians on an idle machine


@dataclass(frozen=True)
class Simulation:
    """All simulated clusters, and the assumptions of the simulation."""

    points: tuple[Point, ...]
    assumptions: tuple[str, ...]
    caption: str  # the most important of them, for the picture


def simulate(request: Request, console: Console) -> Simulation:
    """Measure a task or load its measurements, simulate, print tables and assumptions, and write the files.

    Raises:
        ValueError: The request contradicts itself, or a file cannot be read or written; the message says what to
            change.

    """
    check_request(request)
    check_files(request)
    measured = None
    if request.parameters is None:
        measured = _measurements(request, console)
        if request.save is not None:
            request.save.parent.mkdir(parents=True, exist_ok=True)
            write_series(measured, request.save)
        found = simulate_measured(request, measured)
    else:
        found = simulate_sizes(request)
    _print(found, console)
    if request.out is not None:
        _write(found, measured, request)
        console.print(f"\ntable, picture and data  {request.out}", highlight=False, soft_wrap=True, markup=False)
    return found


def simulate_measured(request: Request, series: Series) -> Simulation:
    """Return the simulation of measured hooks."""
    noop, factor = series.calmest.noop.seconds.median, 1.0
    if request.compute is not None:
        stated = Compute.parse(request.compute)
        factor = stated.factor or (stated.seconds or 0.0) / noop
    backend = backend_of(request, factor)
    points = _points(request, backend, series.at, factor)
    compute = seconds_in_words(factor * noop)
    caption = (
        f"{series.calmest.model} on {series.calmest.machine}: compute {compute} a step, "
        f"{counted(request.cores, 'core')} a rank, latency {seconds_in_words(request.links[0].latency)}."
    )
    if max(request.ranks) > series.most_ranks:
        caption += f" Compression beyond {series.most_ranks} ranks is extrapolated."
    said = (*_said_of(series, factor, request), backend_in_words(backend), *_said_of_links(request))
    return Simulation(points, said, caption)


def simulate_sizes(request: Request) -> Simulation:
    """Return the simulation of a model given only by its number of parameters and its compute."""
    assert request.parameters is not None and request.compute is not None, "checked before"
    seconds = Compute.parse(request.compute).seconds
    assert seconds is not None, "checked before"
    backend = backend_of(request)
    sizes = Stated(
        shapes=square_matrices(request.parameters, MATRIX), compute=seconds, cores=request.cores, are_alike=True
    )
    free = {hook.label: HookCosts.free(hook.label) for hook in map(exchanged, request.hooks)}
    points = _points(request, backend, lambda ranks: sizes.profile(free, ranks, 0.0))
    said = (
        f"{request.parameters:,.0f} parameters and {seconds_in_words(seconds)} of compute are given; nothing was "
        "measured, and the time of compression is not counted.",
        f"Gradients become ready evenly over the last {percent(1 - FORWARD_SHARE)} of compute, in buckets of "
        f"{bytes_in_words(BUCKET_BYTES)} (of fp32) after a first one of {bytes_in_words(FIRST_BUCKET_BYTES)}; the "
        "optimizer's time is part of the compute.",
    )
    caption = (
        f"{request.parameters:,.0f} parameters, compute {seconds_in_words(seconds)} a step, latency "
        f"{seconds_in_words(request.links[0].latency)}; the time of compression is not counted."
    )
    return Simulation(points, (*said, backend_in_words(backend), *_said_of_links(request)), caption)


def backend_of(request: Request, factor: float = 1.0) -> Backend:
    """Return the requested backend; a copy that is timed here takes `factor` times as long on the user's processor."""
    if request.copy_rate is not None:
        copy = 4 / request.copy_rate
    else:
        copy = factor * copy_seconds() if request.backend == "gloo" else 0.0
    return Backend(request.backend, copy, Costs.read())


def backend_in_words(backend: Backend) -> str:
    """Return a sentence about the backend."""
    if backend.name == "none":
        return "Backend: none. The CPU time of sending is not counted; --backend gloo counts Gloo's."
    costs = backend.costs
    a_byte = costs.hooks[DENSE].copies_per_byte * backend.copy / 4
    return (
        f"Backend: gloo. For each byte of fp32 that it sends, the processor is busy for "
        f"{three_digits(1e9 * a_byte)} ns, as measured for this version, times a copy of memory "
        f"({bytes_in_words(4 / backend.copy)}/s). A message takes {1e6 * costs.hop_seconds:.0f} µs more, and a "
        f"round {1e6 * costs.round_seconds:.0f} µs."
    )


def _measurements(request: Request, console: Console) -> Series:
    """Return the measurements, made now or by an earlier command."""
    if request.measured is None:
        if torchrun_world() is not None:
            raise ValueError("the step is measured in one process: run 'commhooks simulate' without torchrun")
        asked = Asked(
            task=request.task or Spec.parse("gpt:size=base", "task"),
            hooks=tuple(dict.fromkeys(map(exchanged, request.hooks))),
            ranks=request.ranks,
            cores=request.cores,
            bucket_cap_mb=request.bucket_cap_mb,
        )
        return measure(asked, partial(console.print, highlight=False, markup=False))
    series = read_series(request.measured)
    there = series.profiles[0].hooks
    hooks = map(exchanged, request.hooks)
    missing = [hook.label for hook in hooks if label_in_profile(hook.label) not in there]
    if missing:
        raise ValueError(
            f"measured {request.measured}: hook {missing[0]!r} was not measured; there are {listed(tuple(there))}"
        )
    return series


def _points(
    request: Request, backend: Backend, profile_of: Callable[[int], Profile], factor: float = 1.0
) -> tuple[Point, ...]:
    profiles = {ranks: profile_of(ranks) for ranks in request.ranks}

    def time(hook: Spec, ranks: int, link: Link) -> StepTime:
        sent = exchanged(hook).label
        if request.sharded:
            measured = None if sent == PLAIN else profiles[ranks].hooks[label_in_profile(sent)]
            step = sharded_step_of(profiles[ranks], measured, cores=request.cores, overlaps=request.backend != "gloo")
            return Unlinked(step.scaled(factor), ranks).over(backend.carry(link, sent)).time
        own = profiles[ranks].hooks[label_in_profile(sent)]
        unlinked = Unlinked.of(profiles[ranks], own, cores=request.cores, slower=factor)
        carried = backend.carry(link, sent)
        if not is_seldom(hook):
            return unlinked.over(carried).time
        step, rounds = unlinked.step, Seldom.of(hook).rounds
        seconds = step.compute + step.optimizer
        return round_time(rounds, step.buckets, seconds, carried, ranks, cores=step.cores).divided(rounds.every)

    return tuple(
        Point(hook.label, ranks, link, time(hook, ranks, link))
        for link in request.links
        for hook in (*([Spec.parse(PLAIN)] if request.sharded else []), *request.hooks)
        for ranks in request.ranks
    )


def _said_of(series: Series, factor: float, request: Request) -> list[str]:
    """Return sentences about the measurements, and about extrapolations from them."""
    profile, timed = series.calmest, [one.ranks for one in series.profiles]
    parameters = sum(math.prod(one.shape) for one in profile.gradients)
    compute, buckets = profile.noop.seconds.median, profile.hooks[NOOP].buckets
    load = "an unknown load" if profile.load is None else f"a load of {profile.load}"
    said = [
        f"{profile.model} ({parameters:,} parameters, {counted(len(buckets), 'bucket')}): compute of "
        f"{seconds_in_words(compute)} a step and all compression were measured in real steps of one process, as one of "
        f"{listed(list(map(str, timed)))} ranks, with one thread on {profile.machine}, with {load}.",
        f"Each rank has {counted(request.cores, 'core')}"
        + (": compression delays the backward pass." if request.cores == 1 else ": compression runs beside compute."),
        "Hooks are simulated as in the first steps that were measured; what they do only later, as after start_after "
        "or at the end of a schedule, is not described.",
    ]
    if any(map(is_seldom, request.hooks)):
        said.append(
            "With seldom communication, a step's time is a part of that of a round; the outer optimizer's is not "
            "counted, and exchanges have the collectives of the compressor in a step, in as many parts as fragments."
        )
    said += _said_of_shards(request)
    if min(request.cores, 2) != profile.cores:
        said.append(f"It was measured with {counted(profile.cores, 'core')}; what another number changes is modelled.")
    if any(
        hook.step.seconds.median < (1 - _NOISE) * one.noop.seconds.median
        for one in series.profiles
        for hook in one.hooks.values()
    ):
        said.append(
            "Other load disturbed the steps: some under a hook took less time than those without one. Simulate again "
            "when the machine is idle."
        )
    if factor != 1:
        said.append(
            f"Compute and compression are scaled alike, by {factor:.3g}: {seconds_in_words(factor * compute)} a "
            "step. A processor that is faster at one of them is not described."
        )
    labels = list(dict.fromkeys(hook.label for hook in map(exchanged, request.hooks)))
    if between := [f"{n:,}" for n in request.ranks if n < timed[-1] and n not in timed]:
        said.append(
            f"Interpolated: the compression of {listed(labels)} with {listed(between)} ranks, from that of the nearest "
            f"of {listed(list(map(str, timed)))} ranks."
        )
    for label in labels:
        uncounted = [n for n in request.ranks if n > 1 and not series.is_counted(label_in_profile(label), n)]
        if uncounted:
            said.append(
                f"Extrapolated: the payloads of {label} for {listed([f'{ranks:,}' for ranks in uncounted])} ranks."
            )
    if max(request.ranks) > timed[-1]:
        said.append(
            f"Extrapolated: the compression of {listed(labels)} beyond the {timed[-1]} ranks as one of which it was "
            "timed. It grows linearly with the bytes of the answers, if more ranks have larger answers; otherwise it "
            "stays."
        )
    now = versions()
    other = [f"{name} {number}" for name, number in profile.versions.items() if now.get(name) != number]
    if other:
        said.append(f"Note: it was measured with other versions: {', '.join(other)}.")
    return said


def _said_of_shards(request: Request) -> list[str]:
    if not request.sharded:
        return []
    waits = "It waits for every exchange before it computes on."
    hides = "It gathers a module ahead, and waits for reductions at the end."
    return [
        f"FSDP2 shards the model; {PLAIN} is plain FSDP2. Modules are told by the numbers in parameters' names, and "
        f"FSDP2's copies are not counted. {waits if request.backend == 'gloo' else hides}"
    ]


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
        table = plain_table(f"{title_of(link)}: step time and utilisation", tuple(hooks), first="ranks")
        for ranks in dict.fromkeys(point.ranks for point in own):
            times = [next(p.time for p in own if (p.hook, p.ranks) == (hook, ranks)) for hook in hooks]
            table.add_row(
                f"{ranks:,}", *(f"{seconds_in_words(time.seconds)}  {percent(time.utilisation)}" for time in times)
            )
        console.print(table)
    console.print("\nAssumptions", style="bold")
    for sentence in found.assumptions:
        console.print(f"- {sentence}", highlight=False, markup=False)


def _write(found: Simulation, measured: Series | None, request: Request) -> None:
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
    stored.write_text(folder / TABLE, text.getvalue())
    stored.write_bytes(folder / PICTURE, utilisation_picture(found.points, found.caption, LIGHT))
    data = {
        "command": request.command,
        "assumptions": found.assumptions,
        "measured": None if measured is None else dataclasses.asdict(measured),
        "versions": versions(),
        "machine": machine(),
    }
    stored.write_text(folder / DATA, json.dumps(data) + "\n")


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
