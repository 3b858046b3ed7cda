"""Runs that never ran: results with round numbers, for tests of what is made of results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.runs import EvaluationRecord, LayerRecord, ProbeRecord, RunResult, RunSettings, StepRecord
from commhooks.experiments.specs import Spec

DENSE_BYTES = 4_000_000
STARTED = 1_800_000_000.0  # Unix time
HOOKS = (("all-reduce", 1, 1.0), ("fp16", 2, 1.0), ("powersgd:rank=4", 20, 1.1))
"""Hook, how many times smaller its messages are, and how many times more steps it needs."""


def result(
    hook: str = "all-reduce",
    *,
    task: str = "gpt",
    steps: int = 40,
    ratio: float = 1,
    slower: float = 1.0,
    seed: int = 0,
    link: str = "100Mbit/s",
    layers: int = 3,
    **settings: object,
) -> RunResult:
    """Return a run whose loss falls by a law, whose messages are `ratio` times smaller, and which learns `slower`.

    Seeds differ: in the loss by a tenth of a hundredth, in the time by a hundredth.
    """
    chosen = LinkSettings.parse(link)
    rate = chosen.bits_per_second or 1e9
    waiting = 8 * DENSE_BYTES / rate / ratio * (1 + 0.01 * _noise(seed, hook))
    moved = int(DENSE_BYTES / ratio)
    records = tuple(
        StepRecord(
            step=n,
            loss=2 + 0.01 * _noise(seed, hook) + 3 * math.exp(-n / (steps / 4 * slower)),
            seconds=0.05 + 0.01 + waiting + 0.002 * (n % 3),
            compute=0.05 + 0.002 * (n % 3),
            compression=0.01,
            waiting=waiting,
            hidden=0.01,
            gradient_bytes=DENSE_BYTES,
            payload_bytes=moved,
            moved_bytes=moved,
            dense_bytes=DENSE_BYTES,
            ended=STARTED + n,  # another run's step lies in between
        )
        for n in range(1, steps + 1)
    )
    evaluated = range(max(1, steps // 4), steps + 1, max(1, steps // 4))
    lossy = 0.0 if ratio == 1 else 0.1 * math.log(ratio)
    return RunResult(
        settings=RunSettings(
            task=Spec.parse(task, "task"),
            hook=Spec.parse(hook),
            steps=steps,
            seed=seed,
            link=dataclasses.replace(chosen, latency_seconds=2e-4),
            **settings,  # type: ignore[arg-type]  # "object" is whatever the caller gives a field
        ),
        parameters=DENSE_BYTES // 4,
        description="a task that is not one",
        source="",
        steps=records,
        evaluations=tuple(
            EvaluationRecord(
                step=n,
                loss=records[n - 1].loss + 0.05,
                metrics={"accuracy": 0.3 + 0.6 * n / steps - 0.02 * lossy, "bits_per_byte": 3.0},
            )
            for n in evaluated
        ),
        probes=tuple(
            ProbeRecord(
                step=n,
                error=lossy,
                residual=None if ratio <= 2 else lossy * 3 * n / steps,
                layers=tuple(_layer(number, layers, ratio, lossy) for number in range(layers)),
            )
            for n in evaluated
        ),
        replicas_identical=True,
        time_scale=1.0,
        compute_here=None,
        versions={"python": "3", "torch": "2"},
        machine={"processor": "a processor", "cores": 2, "load": 0.5, "threads_per_rank": 1, "system": "Linux x86_64"},
    )


def results(
    tasks: Sequence[str] = ("digits", "gpt"), seeds: Sequence[int] = (0,), links: Sequence[str] = ("100Mbit/s",)
) -> list[RunResult]:
    """Return runs of every task under three hooks each."""
    return [
        result(hook, task=task, ratio=ratio, slower=slower, seed=seed, link=link)
        for task in tasks
        for link in links
        for seed in seeds
        for hook, ratio, slower in HOOKS
    ]


def stepwise(run: RunResult, change: Callable[[StepRecord], dict[str, Any]]) -> RunResult:
    """Return the run with some figures of each step changed."""
    return dataclasses.replace(run, steps=tuple(dataclasses.replace(step, **change(step)) for step in run.steps))


def with_slow_probes(run: RunResult) -> RunResult:
    """Return the run as if every other step had been probed, which took 9 seconds for each of its parts."""
    slow = {"probed": True, "seconds": 27.0, "compute": 9.0, "compression": 9.0, "waiting": 9.0}
    return stepwise(run, lambda step: slow if step.step % 2 == 0 else {})


def diverged(run: RunResult, after: int = 20) -> RunResult:
    """Return the run as if its loss had stopped being finite."""
    lost = stepwise(run, lambda step: {} if step.step <= after else {"loss": math.nan})
    evaluations = tuple(
        one if one.step <= after else dataclasses.replace(one, loss=math.nan, metrics={"accuracy": math.nan})
        for one in run.evaluations
    )
    return dataclasses.replace(lost, evaluations=evaluations)


def _noise(seed: int, hook: str) -> float:
    """Return one of a few numbers around zero, the same every time."""
    return (0.0, 1.0, -1.0, 0.5, -0.5)[(seed * 3 + len(hook)) % 5]


def _layer(number: int, layers: int, ratio: float, error: float) -> LayerRecord:
    bias = number % 3 == 2
    elements = DENSE_BYTES // 4 // layers + (0 if bias else number + 1)
    name = (
        f"blocks.{number // 3}.attention.projection.{'bias' if bias else 'weight'}" if layers > 3 else f"layer{number}"
    )
    return LayerRecord(
        name=name,
        elements=elements,
        payload_bytes=4 * elements / (1 if bias else ratio),
        error=0.0 if bias else error * (1 + 0.1 * (number % 5)),
        residual=None if ratio <= 2 else error * 2,
    )
