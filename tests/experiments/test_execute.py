"""Comparison groups, what is kept of runs that fail, and time scaling; the processes are played by a function."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from commhooks.experiments.cluster import Cluster
from commhooks.experiments.launch import WorldError, reason_of
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.sweeps import execute
from commhooks.experiments.training.worker import GroupBegun, Preparing, RunDone, StepsBegin, Work, calibrate
from tests.experiments.synthetic import result

HOOKS = ("all-reduce", "breaks", "fp16")
World = Callable[..., None]


def settings(hook: str = "all-reduce", seed: int = 0, link: str = "100Mbit/s", **others: Any) -> RunSettings:
    return RunSettings(
        task=Spec("digits"), hook=Spec(hook), seed=seed, steps=40, link=LinkSettings.parse(link), **others
    )


def played(
    breaks: Iterable[str] = (), worlds: list[Work] | None = None, measures: Callable[..., None] | None = None
) -> World:
    """Return what stands for a world: it makes runs group by group, and fails in a group with a hook that breaks.

    measures: stands for the world in which the compute of runs is measured.
    """

    def world(function: object, ranks: int, work: Any, hear: Callable[[object], None], **_: object) -> None:
        if function is calibrate:
            assert measures is not None
            measures(work, hear)
            return
        if worlds is not None:
            worlds.append(work)
        groups: dict[RunSettings, list[int]] = {}
        for number, one in work.runs.items():
            groups.setdefault(one.comparison_group, []).append(number)
        for numbers in groups.values():
            hear(GroupBegun(tuple(numbers)))
            for number in numbers:
                if work.runs[number].hook.name in breaks:
                    raise WorldError(f"rank 1 failed: {work.runs[number].hook.name}")
            for number in numbers:
                hear(RunDone(number, dataclasses.replace(result(), settings=work.runs[number])))

    return world


def test_a_run_that_fails_ends_neither_its_comparison_group_nor_the_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(execute, "run_world", played({"breaks"}))
    runs = [settings(hook, seed) for seed in (0, 1) for hook in HOOKS]
    heard: list[tuple[RunSettings, object]] = []
    made = execute.execute(runs, tmp_path, lambda *message: heard.append(message))
    assert {one.hook.name for one in made.failures} == {"breaks"}
    told = {one: message.traceback for one, message in heard if isinstance(message, execute.RunFailed)}
    assert told == made.failures and "rank 1 failed: breaks" in next(iter(told.values()))
    assert set(made.results) | set(made.failures) == set(runs)
    assert {RunResult.read(path).settings for path in (tmp_path / "results").iterdir()} == set(made.results)


def test_a_calibration_that_fails_costs_only_the_runs_that_it_was_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measures(runs: list[RunSettings], hear: Callable[[object], None]) -> None:
        hear(Preparing())
        if runs[0].seed == 1:
            raise WorldError("rank 1 died")
        hear(0.1)

    monkeypatch.setattr(execute, "run_world", played(measures=measures))
    runs = [settings(hook, seed, compute="200ms") for seed in (0, 1, 2) for hook in ("fp16", "int8")]
    made = execute.execute(runs, tmp_path, lambda *_: None)
    assert {one.seed for one in made.failures} == {1} and len(made.failures) == 2
    assert {one.seed for one in made.results} == {0, 2} and len(made.results) == 4


def test_compute_is_measured_before_every_comparison_group_that_states_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worlds: list[Work] = []
    here = iter((0.1, 0.4, 0.1, 0.6))

    def measures(runs: list[RunSettings], hear: Callable[[object], None]) -> None:
        assert len({one.comparison_group for one in runs}) == 1
        hear(next(here))
        hear(next(here))  # after more steps

    monkeypatch.setattr(execute, "run_world", played(worlds=worlds, measures=measures))
    runs = [settings(hook, seed, compute="200ms") for seed in (0, 1) for hook in ("fp16", "int8")]
    execute.execute([*runs, settings(), settings(compute="0.5x")], tmp_path, lambda *_: None)
    assert [(work.time_scales, work.compute_here) for work in worlds] == [
        ({0: 2.0, 1: 2.0}, {0: 0.4, 1: 0.4}),
        ({0: pytest.approx(3.0), 1: pytest.approx(3.0)}, {0: 0.6, 1: 0.6}),
        ({0: 1.0, 1: 2.0}, {}),
    ]


def test_hosts_have_links_as_slow_as_the_compute_and_rates_change_from_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[object] = []

    def create(ranks: int, **rates: object) -> Any:
        done.append(rates)
        return nullcontext("a cluster")

    def follow(cluster: object, schedule: object) -> Any:
        done.append(schedule)
        return nullcontext()

    def world(function: object, ranks: int, work: Work, hear: Callable[[object], None], **_: object) -> None:
        hear(GroupBegun((0,)))
        done.append("the models are made")
        hear(StepsBegin())
        hear(RunDone(0, dataclasses.replace(result(), settings=work.runs[0])))

    monkeypatch.setattr(execute, "run_world", world)
    monkeypatch.setattr(execute, "follow", follow)
    monkeypatch.setattr(Cluster, "create", create)
    execute.execute([settings(link="hosts:8Mbit/s+2Mbit/s@30s", compute="0.5x")], tmp_path, lambda *_: None)
    assert done == [{"up": 4e6, "down": 4e6}, "the models are made", ((60.0, 1e6),)]


@pytest.mark.parametrize("link", ["hosts:1Mbit/s", "hosts:4Mbit/s,down=1Mbit/s", "hosts:8Mbit/s+1Mbit/s@30s"])
def test_hosts_that_would_be_too_slow_cost_only_their_own_runs(
    link: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(execute, "run_world", played(measures=lambda runs, hear: hear(0.2)))
    monkeypatch.setattr(Cluster, "create", lambda ranks, **rates: nullcontext())
    runs = [settings(link=one, compute="10ms") for one in ("hosts:100Mbit/s", link, "hosts:50Mbit/s", "1Mbit/s")]
    made = execute.execute(runs, tmp_path, lambda *_: None)
    assert (list(made.failures), len(made.results)) == ([runs[1]], 3)
    assert re.search("20 times as slow, .* .got 50 kbit/s", reason_of(made.failures[runs[1]]))
