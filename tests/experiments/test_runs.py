"""Runs: how they are planned, their settings, results as files, and what a summary makes of them."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from commhooks.experiments.hooks import make_hook
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.results.summary import Typical, steps_to
from commhooks.experiments.runs import RunResult, RunSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.sweeps.plan import crowded, in_turn, plan
from commhooks.experiments.sweeps.store import finished
from tests.experiments.synthetic import result


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    before = result("powersgd:rank=4,epsilon=0.5")
    path = before.write(tmp_path)
    assert path.name == f"gpt.powersgd-epsilon-0.5-rank-4.seed-0.{before.settings.key}.json"
    assert RunResult.read(path) == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"hook": "powersgd:rank=4,start_after=2"}, {"hook": "powersgd: start_after=2, rank=4.0"}),
        ({"optimizer": "sgd:lr=1,momentum=0.9"}, {"optimizer": "sgd:lr=1.0,momentum=0.90"}),
        ({"hook": "all-reduce", "link": "unlimited", "ddp": "core", "seed": 0, "ranks": 2}, {}),
        ({"link": "100Mbit/s"}, {"link": "emulated:rate=0.1Gbit/s,latency=0,framing=on"}),
        ({"compute": "200ms"}, {"compute": " 200 ms"}),
    ],
)
def test_what_means_the_same_has_the_same_name(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = (RunSettings.from_dict({"task": "gpt", **each}) for each in (one, other))
    assert (first, first.name, first.hook.label) == (second, second.name, second.hook.label)


def test_what_differs_in_any_setting_has_a_name_of_its_own() -> None:
    hooks = ("fp16", "powersgd", "powersgd:rank=1", "powersgd:rank=2", "x:on=true", "x:on=1")
    links = ("1Mbit/s", "1Mbit/s,latency=1ms", "1Mbit/s,framing=off", "hosts:1Mbit/s", "1Mbit/s+2Mbit/s@1s")
    changes = {
        "task": ["lstm"], "hook": hooks, "optimizer": ["sgd", "adamw"], "ranks": [3], "steps": [99], "seed": [1],
        "device": ["cuda"], "link": links, "compute": ["1s", "1x"], "ddp": ["torch"], "bucket_cap_mb": [1, 2.5],
        "evaluate_every": [7],
    }  # fmt: skip
    assert set(changes) == {each.name for each in dataclasses.fields(RunSettings)}
    runs = [RunSettings.from_dict({"task": "gpt", key: value}) for key, values in changes.items() for value in values]
    runs.append(RunSettings.from_dict({"task": "gpt"}))
    assert len({one.key for one in runs}) == len(runs) == len({one.name for one in runs})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_result_with_numbers_that_are_not_finite_is_json_and_survives(tmp_path: Path, number: float) -> None:
    good = result("powersgd:rank=4")
    layer = dataclasses.replace(good.probes[0].layers[0], name="nan", error=number, residual=number)
    bad = dataclasses.replace(
        good,
        steps=(dataclasses.replace(good.steps[0], loss=number), *good.steps[1:]),
        evaluations=(dataclasses.replace(good.evaluations[0], metrics={"accuracy": number}), *good.evaluations[1:]),
        probes=(dataclasses.replace(good.probes[0], error=number, residual=number, layers=(layer,)),),
    )
    path = bad.write(tmp_path)
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert repr(RunResult.read(path)) == repr(bad)  # NaN does not equal itself
    path.write_text(path.read_text().replace(f'"{number}"', "null", 1))  # as earlier versions wrote it
    assert math.isnan(RunResult.read(path).steps[0].loss)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("steps", "seconds", 2), -0.1, "steps: seconds must be above zero and finite"),
        (("steps", "waiting", 2), -5.0, r"step 3: compute \+ compression \+ waiting must be above zero"),
        (("steps", "moved_bytes"), [], "steps: moved_bytes has 0 values, others have 40"),
        (("steps", "loss", 0), True, "steps: loss must be of type float"),
        (("evaluations", 0, "metrics", "accuracy"), "1.5", "evaluations: accuracy must be of type int or float"),
        (("evaluations", 0), {"step": 1}, "evaluations: .*missing 1 required .*'loss'"),
        (("goal",), {"loss": 1.0, "seconds": -1.0, "steps": 40}, "goal: seconds must be above zero"),
        (("machine",), {"processor": "x", "system": "y"}, "machine: 'cores'"),
        (("format",), 0, "it is of format 0, "),
        (("parameters",), 10**400, "parameters must be at least zero and finite"),
    ],
)
def test_a_value_that_nothing_can_have_is_refused_with_file_and_field(
    tmp_path: Path, place: tuple[str | int, ...], value: object, words: str
) -> None:
    path = result().write(tmp_path)
    inside = raw = json.loads(path.read_text())
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=rf"{path}: expected a result file of format 2 \({words}.*; move it away"):
        RunResult.read(path)


def test_a_typical_step_is_the_mean_of_the_middle_half() -> None:
    durations = (100, 2, 3, 4, 5, 6, 7, 0)  # the shortest and longest two are left out: 0, 2, 7 and 100
    steps = [
        dataclasses.replace(result().steps[0], compute=seconds, compression=2 * seconds, waiting=0.5, seconds=seconds)
        for seconds in durations
    ]
    assert (typical := Typical.of(steps)).compute == 4.5
    assert (typical.compression, typical.waiting, typical.seconds) == (9, 0.5, 14)


def test_a_target_is_reached_after_the_first_ten_steps_whose_mean_is_at_or_below_it() -> None:
    losses = [0.0, *[4.0] * 9, 2.0, *[1.0] * 9]
    steps = [dataclasses.replace(result().steps[0], loss=loss) for loss in losses]
    means = [sum(losses[end - 10 : end]) / 10 for end in range(10, 21)]
    assert means[:3] == [3.6, 3.8, 3.5] and means[-1] == 1.1
    assert [steps_to(target, steps) for target in (3.6, 3.5, 1.1, 1.0)] == [10, 12, 20, None]
    assert [steps_to(2.0, steps[:count]) for count in (3, 5)] == [None, None]
    assert steps_to(3.2, steps[:5]) == 5  # of a run with fewer, all


def planned(**changes: Any) -> tuple[RunSettings, ...]:
    asked: dict[str, Any] = {"tasks": ["digits:size=small"], "hooks": ["all-reduce"], "links": [LinkSettings()]}
    return plan(**{**asked, **changes})


def test_what_takes_turns_stays_together() -> None:
    """Of everything that varies, the hook varies fastest: runs that differ in nothing else train in turns."""
    tasks = ["gpt:size=small", "digits:size=small"]
    many = planned(tasks=tasks, hooks=["fp16", "bf16"], seeds=[0, 1], links=["1Gbit/s", "10Mbit/s"], ranks=[2, 3])
    assert len(many) == 32 and [run.task.label for run in many[::16]] == tasks
    assert {run.steps for run in many} == {40}  # the tasks' own
    assert [run.hook.label for run in many] == ["fp16", "bf16"] * 16
    assert all(one.comparison_group == other.comparison_group for one, other in zip(many[::2], many[1::2], strict=True))
    assert in_turn(many) == in_turn((*many[::2], *many[1::2])) == many
    with pytest.raises(ValueError, match="listed twice"):
        in_turn((*many, many[3]))


def test_hooks_that_do_not_suit_the_optimizer_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {
        "hooks": ["all-reduce", "dgc"],
        "tasks": ["digits:size=tiny"],
        "optimizers": ["sgd:lr=0.1", None],
    }
    told = "digits:size=tiny: dgc with SGD: momentum is applied twice, by both; give the optimizer a momentum of 0"
    with pytest.warns(UserWarning, match=told) as heard:  # digits' own optimizer has momentum
        planned(**asked, seeds=[0, 1])
    assert len(heard) == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(**asked, ranks=[2])  # torchrun's rank 0 says it


def test_ranks_that_share_cores_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert crowded(planned()) is None
    warning = crowded(planned(ranks=[4]))
    assert warning is not None and "4 ranks share 2 cores" in warning and "--compute 200ms" in warning
    assert crowded(planned(ranks=[4], compute="200ms")) is None
    assert crowded((*planned(ranks=[2]), *planned(ranks=[4], compute="200ms"))) is None
    assert crowded(planned(ranks=[4]), 4) is None
    assert crowded(planned(ranks=[4], links=["real"])) is None


def test_a_rate_that_hosts_can_have_once_it_is_slowed_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commhooks.experiments.sweeps.plan.why_not", lambda: None)
    for link, compute in (("hosts:50kbit/s", "4x"), ("hosts:50kbit/s", "200ms"), ("hosts:unlimited", None)):
        assert planned(links=[link], compute=compute)


def test_under_torchrun_its_world_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert planned()[0].ranks == 3
    with pytest.raises(ValueError, match="torchrun started 3"):
        planned(ranks=[2])


def test_what_is_random_in_a_hook_follows_the_seed_of_the_run() -> None:
    spec = Spec.parse("powersgd:rank=2")
    assert make_hook(spec, seed=7) == make_hook(Spec.parse("powersgd:rank=2,seed=7"))
    assert make_hook(spec, seed=7) != make_hook(spec, seed=8)


def test_results_of_another_version_of_a_task_and_under_another_run_s_name_are_not_taken(tmp_path: Path) -> None:
    one, folder = dataclasses.replace(result(), source="of its file"), tmp_path / "results"
    folder.mkdir()
    one.write(folder)
    asked, label = one.settings, one.settings.task.label
    assert finished(tmp_path, [asked], {label: one.source}) == {asked: one}
    with pytest.raises(ValueError, match=f"task '{label}' has changed since .* cannot be compared; .*--overwrite"):
        finished(tmp_path, [asked], {label: "of its file now"})
    other = dataclasses.replace(asked, seed=7)
    (folder / one.file_name).rename(folder / f"{other.name}.json")
    with pytest.raises(ValueError, match="holds the run of other settings than its name says"):
        finished(tmp_path, [other], {label: one.source})
