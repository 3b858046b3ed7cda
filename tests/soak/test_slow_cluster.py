"""Whether the emulated link agrees with hosts on a real one; it needs root and a quiet machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from commhooks.experiments.cluster import why_not
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.results.summary import unprobed
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.sweeps.execute import execute
from commhooks.experiments.sweeps.plan import plan

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

SETTLED = 4  # steps after which buckets, warm-up and memory have settled


def made(runs: Sequence[RunSettings], folder: Path) -> dict[RunSettings, RunResult]:
    outcome = execute(runs, folder, lambda settings, message: None)
    assert not outcome.failures, next(iter(outcome.failures.values()))
    return outcome.results


def step_seconds(result: RunResult) -> float:
    return statistics.median(step.seconds for step in unprobed(result.steps[SETTLED:]))


def test_the_emulated_link_takes_the_time_of_the_real_one(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    hooks = ["all-reduce", "fp16", "int8", "top-k:ratio=0.01", "powersgd:rank=4"]
    ratios = []
    for rate in ("20Mbit/s", "100Mbit/s", "500Mbit/s"):
        for ranks in (2, 4):
            both = [LinkSettings.parse(f"{kind}:rate={rate}") for kind in ("hosts", "emulated")]
            runs = plan(["gpt:size=medium"], hooks, ranks=[ranks], links=both, steps=SETTLED + 8, evaluate_every=100)
            seconds = {(r.settings.link, r.settings.hook): step_seconds(r) for r in made(runs, tmp_path).values()}
            for hook in dict.fromkeys(settings.hook for settings in runs):
                ratios.append(seconds[both[1], hook] / seconds[both[0], hook])
                print(f"{rate}, {ranks} hosts, {hook.label}: emulated / real = {ratios[-1]:.2f}")
    print(f"median {statistics.median(ratios):.3f}")
    assert 0.9 <= statistics.median(ratios) <= 1.1
    assert sum(0.8 <= ratio <= 1.2 for ratio in ratios) >= 0.9 * len(ratios)
