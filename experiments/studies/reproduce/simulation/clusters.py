"""Simulated step times beside measured ones, on clusters of network namespaces.

For each number of hosts and each rate a world of ranks measures what its links carry without a limit and a profile as
one of as many ranks, and then real steps under every hook, in turns with steps that send nothing. Of all this the model
is given everything but the real steps: nothing is fitted to them. Hosts that share cores are slowed down together with
their links, so that each has the processor of one core in the seconds that are reported.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from commhooks.experiments import stored
from commhooks.experiments.launch import Tell
from commhooks.experiments.links.link import LinkSettings, format_rate, parse_rate
from commhooks.experiments.machine import cores, dilation
from commhooks.experiments.planning import Profile
from commhooks.experiments.planning.candidates import label_in_profile
from commhooks.experiments.planning.measurements import Asked, profile_step
from commhooks.experiments.planning.predicting import step_of, step_over, unmodelled
from commhooks.experiments.report.words import percent
from commhooks.experiments.runs import RunSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.timing.link import Link
from commhooks.experiments.timing.step_time import Step, StepTime
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.experiments.training.stepper import Stepper
from commhooks.units import seconds_in_words, three_digits
from experiments.studies.blocks import Block, Picture, Table
from experiments.studies.medians import milliseconds
from experiments.studies.predictions.steps import measure_steps
from experiments.studies.ranks import on_ranks
from experiments.studies.reproduce.notes import Notes
from experiments.studies.reproduce.reproduction import Reproduction
from experiments.studies.reproduce.simulation.drawing import measured_and_simulated
from experiments.studies.turns import in_turns

_PROBES = 9
_LARGE = 1_000_000  # elements of fp32
_MEDIAN_TARGET, _NINE_IN_TEN_TARGET = 0.15, 0.25


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the measurement."""

    kind: str = "hosts"
    hosts: tuple[int, ...] = (2, 4, 8)
    rates: tuple[str, ...] = ("50Mbit/s", "200Mbit/s", "1Gbit/s")
    hooks: tuple[str, ...] = ("all-reduce", "fp16", "int8", "powersgd:rank=4", "top-k:ratio=0.01")
    task: str = "gpt:size=medium,width=128,heads=4,batch_size=8"
    bucket_cap_mb: float = 1.0
    steps: int = 8  # of each case


def measure(settings: Settings, notes: Notes) -> dict[str, Any]:
    """Return the cases of all numbers of hosts and rates, each with what the model is given."""
    cases: list[Any] = []
    for hosts in settings.hosts:
        for rate in settings.rates:
            take = partial(_measure, settings, hosts, rate, notes.tell)
            cases += notes.once(f"{hosts} hosts, {rate}", take)
    return {"cases": cases}


def _measure(settings: Settings, hosts: int, rate: str, tell: Tell) -> list[dict[str, Any]]:
    """Return a case for each hook; the model's input is measured for each rate, as the machine's load changes."""
    tell(f"{hosts} hosts, {rate}")
    unlimited = LinkSettings(kind=settings.kind)
    run = RunSettings(
        task=Spec.parse(settings.task, "task"),
        ranks=hosts,
        link=dataclasses.replace(unlimited, bits_per_second=parse_rate(rate)),
        bucket_cap_mb=settings.bucket_cap_mb,
    )
    profile, link = on_ranks(partial(_without_a_limit, run, settings), hosts, tell, link=unlimited)
    taken = measure_steps(run, settings.hooks, settings.steps, tell)
    cases = []
    for hook, seconds in taken.seconds.items():
        tell(f"{hook}: {seconds_in_words(statistics.median(seconds))} a step")
        own = profile.hooks[label_in_profile(hook)]  # timed on a core of its own
        unlinked = step_of(profile, own, own.buckets)
        buckets = zip(unlinked.buckets, taken.ready, strict=True)
        step = dataclasses.replace(
            unlinked,
            compute=taken.compute,
            optimizer=taken.optimizer,
            buckets=tuple(dataclasses.replace(bucket, ready=moment) for bucket, moment in buckets),
            cores=1,
        )
        cases.append(
            {
                "hosts": hosts,
                "rate": parse_rate(rate) or math.inf,
                "hook": hook,
                "steps": list(seconds),
                "step": asdict(step),
                "unknown": unmodelled(profile, own),
                "link": link,
            }
        )
    return cases


def _without_a_limit(run: RunSettings, settings: Settings, tell: Tell) -> tuple[Profile, dict[str, float]]:
    """Return, on rank 0, a profile as one of the ranks on a core that no other uses, and what links carry, as reported.

    Links are measured with an all-reduce of 4 bytes, each rank's hops one after another, and with a large one.
    """
    ranks, slow = run.ranks, dilation(run.ranks)
    payloads = {elements: partial(dist.all_reduce, torch.zeros(elements)) for elements in (1, _LARGE)}
    taken = in_turns(payloads, _PROBES, warm_up=0)
    small, large = (statistics.median(seconds) / slow for seconds in taken.values())
    sent = 2 * (ranks - 1) / ranks * 4 * _LARGE
    link = {"latency": small / (2 * (ranks - 1)), "seconds_per_byte": max(0.0, large - small) / sent}
    profile: Any = None  # on a rank that finds no core
    on_cores = range(min(ranks, cores()))
    group = dist.new_group(on_cores)
    if dist.get_rank() in on_cores:
        task = load_task(run.task)
        step = Stepper(task, wrap_in_ddp(task.model, run.ddp, run.bucket_cap_mb, group))
        hooks = tuple(map(Spec.parse, settings.hooks))
        asked = Asked(task=run.task, hooks=hooks, link=LinkSettings(), steps=settings.steps)
        profile = profile_step(step, asked, as_ranks=ranks, group=group)
        step.close()
    return profile, link


def simulated(case: Mapping[str, Any]) -> StepTime:
    """Return what is predicted of a case; of an earlier one only the model's part, as it has no step without a link."""
    step, link = stored.made_of(Step, case["step"]), Link(rate=case["rate"], **case["link"])
    return step_over(step, link, case["hosts"], more=case.get("unknown", 0.0))


def show(settings: Settings, measured: Mapping[str, Any]) -> list[Block]:
    """Return a table of all cases, the errors, and a picture."""
    cases = [{**case, "simulated": asdict(simulated(case))} for case in measured["cases"]]
    rows, errors = [], []
    for case in cases:
        real, expected = statistics.median(case["steps"]), case["simulated"]["seconds"]
        errors.append(expected / real - 1)
        rows.append(
            [
                str(case["hosts"]),
                format_rate(case["rate"]),
                f"`{case['hook']}`",
                milliseconds(case["steps"]),
                three_digits(1e3 * expected),
                f"{100 * errors[-1]:+.0f} %",
                percent(case["simulated"]["compute"] / expected),
            ]
        )
    columns = ["hosts", "rate", "hook", "measured, ms (quartiles)", "simulated, ms", "error", "utilisation, simulated"]
    blocks: list[Block] = [Table("Time of a step", columns, rows)]
    columns = ["of", "cases", "median", "90 % within", "median with its sign"]
    blocks.append(Table("Errors", columns, _errors(cases, errors)))
    blocks += [_verdict(errors), _inputs_in_words(cases)]
    return [
        *blocks,
        Picture(
            "measured-and-simulated",
            "simulated over measured step times, logarithmic, with a line where both are equal",
            lambda theme: measured_and_simulated(cases, theme),
        ),
    ]


def _errors(cases: list[Any], errors: list[float]) -> list[list[str]]:
    """Return the errors of all cases, and of those with each number of hosts, rate and hook."""
    rows = [_errors_row("all", errors)]
    for key, name in (("hosts", "{} hosts"), ("rate", "{}"), ("hook", "`{}`")):
        for value in dict.fromkeys(case[key] for case in cases):
            own = [error for case, error in zip(cases, errors, strict=True) if case[key] == value]
            rows.append(_errors_row(name.format(format_rate(value) if key == "rate" else value), own))
    return rows


def _errors_row(name: str, errors: list[float]) -> list[str]:
    sizes = np.abs(errors)
    return [
        name,
        str(len(errors)),
        percent(float(np.median(sizes))),
        percent(float(np.quantile(sizes, 0.9))),
        f"{100 * statistics.median(errors):+.1f} %",
    ]


def _verdict(errors: list[float]) -> str:
    sizes = np.abs(errors)
    median, most = float(np.median(sizes)), float(np.quantile(sizes, 0.9))
    met = [median <= _MEDIAN_TARGET, most <= _NINE_IN_TEN_TARGET]
    return (
        f"Over {len(errors)} cases the simulated step differs from the median measured one by {percent(median)} in the "
        f"median; nine in ten are within {percent(most)}. The goals were {percent(_MEDIAN_TARGET)} (which is "
        f"{'met' if met[0] else 'missed'}) and {percent(_NINE_IN_TEN_TARGET)} ({'met' if met[1] else 'missed'})."
    )


def _inputs_in_words(cases: list[Any]) -> str:
    """Return what the model was given, as medians over the cases of each number of hosts."""
    found = []
    for hosts in dict.fromkeys(case["hosts"] for case in cases):
        own = [case for case in cases if case["hosts"] == hosts]
        compute = statistics.median(case["simulated"]["compute"] for case in own)
        latency = statistics.median(case["link"]["latency"] for case in own)
        a_byte = statistics.median(case["link"]["seconds_per_byte"] for case in own)
        found.append(
            f"{hosts} hosts: compute {seconds_in_words(compute)}, {1e6 * latency:.0f} µs for a message and "
            f"{1e9 * a_byte:.2g} ns for a byte over links without a limit"
        )
    return f"Given to the model, besides compression and bytes (medians over the cases): {'; '.join(found)}."


REPRODUCTION = Reproduction(
    name="simulation-clusters",
    title="Simulated step times beside those of real clusters",
    source="This project: the step-time model of `commhooks plan`",
    said=(
        "The model computes a step's time from compute, compression, bytes and a link (guide, simulate).",
        "Its goal: a median error within 15 %, and 90 % of the cases within 25 %, with nothing fitted to them.",
    ),
    sizes={
        "default": Settings(),
        "tiny": Settings(
            kind="emulated",
            hosts=(2,),
            rates=("50Mbit/s",),
            hooks=("all-reduce", "powersgd:rank=4"),
            task="gpt:size=tiny",
            bucket_cap_mb=0.1,
            steps=3,
        ),
    },
    measure=measure,
    show=show,
)
