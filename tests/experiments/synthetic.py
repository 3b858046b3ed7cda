"""Runs that never ran: results with round numbers, for tests of what is made of results."""

from __future__ import annotations

import math

from experiments.link import LinkSettings
from experiments.runs import EvaluationRecord, RunResult, RunSettings, StepRecord
from experiments.specs import Spec

DENSE_BYTES = 4_000_000
STARTED = 1_800_000_000.0  # Unix time


def result(
    hook: str = "all-reduce", *, task: str = "gpt", steps: int = 40, ratio: int = 1, slower: float = 1.0
) -> RunResult:
    """Return a run whose loss falls by a law, whose messages are `ratio` times smaller, and which learns `slower`."""
    waiting = 0.32 / ratio
    records = tuple(
        StepRecord(
            step=n,
            loss=2 + 3 * math.exp(-n / (10 * slower)),
            seconds=0.05 + 0.01 + waiting + 0.002 * (n % 3),
            compute=0.05 + 0.002 * (n % 3),
            compression=0.01,
            waiting=waiting,
            hidden=0.01,
            gradient_bytes=DENSE_BYTES,
            payload_bytes=DENSE_BYTES // ratio,
            moved_bytes=DENSE_BYTES // ratio,
            dense_bytes=DENSE_BYTES,
            ended=STARTED + n,  # another run's step lies in between
        )
        for n in range(1, steps + 1)
    )
    evaluations = tuple(
        EvaluationRecord(
            step=n, loss=records[n - 1].loss + 0.05, metrics={"accuracy": 0.3 + n / 1000, "bits_per_byte": 3.0}
        )
        for n in range(10, steps + 1, 10)
    )
    return RunResult(
        settings=RunSettings(
            task=Spec.parse(task, "task"),
            hook=Spec.parse(hook),
            steps=steps,
            link=LinkSettings(bits_per_second=100e6, latency_seconds=2e-4),
        ),
        parameters=DENSE_BYTES // 4,
        description="a task that is not one",
        source="",
        probes=(),
        dilation=1.0,
        compute_here=None,
        steps=records,
        evaluations=evaluations,
        replicas_identical=True,
        versions={"python": "3", "torch": "2"},
        machine={"processor": "a processor", "cores": 2, "load": 0.5, "threads_per_rank": 1, "system": "Linux x86_64"},
    )


def results() -> list[RunResult]:
    """Return two tasks under three hooks each."""
    return [
        result(hook, task=Spec.parse(task, "task"), ratio=ratio, slower=slower)
        for task in ("digits", "gpt")
        for hook, ratio, slower in (("all-reduce", 1, 1.0), ("fp16", 2, 1.0), ("powersgd:rank=4", 20, 1.1))
    ]
