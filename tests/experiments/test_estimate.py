"""The command `commhooks estimate`, what it prints, and the comparison with real steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commhooks import make_compressor
from commhooks.compressors import COMPRESSORS
from commhooks.native.library import VARIABLE
from experiments import predicting
from experiments.commands.cli import app
from experiments.estimate.costs import HOOKS, LEFT_OUT, Model, Plan, measure, median_of
from experiments.estimate.request import count_in
from experiments.hooks import make_hook
from experiments.predicting import stored
from experiments.predicting.costs import Costs, Sample
from experiments.specs import Spec
from experiments.studies.predictions import estimates as study
from experiments.studies.predictions.estimates import (
    CONFIGURATIONS,
    WORLDS,
    Checked,
    StepsAt,
    World,
    check,
    measured,
    page,
)
from tests.costs_then import FILE
from tests.tiers import THOROUGH

SIZE = ("--parameters", "2M", "--compute", "50ms", "--copy-rate", "10GB/s")
FEW = ("--hook", "fp16", "--hook", "powersgd:rank=4")


AS_THEN = ("--costs", str(FILE))


def of_gpt(compressor: str) -> float:
    """Return what a compressor costs on the task 'gpt', by the package's file."""
    found = predicting.estimate(1e6, compute=1.0, ranks=2, rate=1e9, hooks=[compressor], copy_rate=1e10)
    (loss,) = (loss for loss in found.of(compressor).losses if loss.task == "gpt")
    assert loss.difference.mean is not None
    return loss.difference.mean


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["estimate", *words])
    return result.exit_code, result.stdout if "--json" in words else result.output


def test_a_table_ends_with_a_conclusion() -> None:
    code, output = run(*SIZE, *FEW, "--rate", "100Mbit/s")
    assert code == 0, output
    assert "2,000,000 parameters in 2 buckets, 4 ranks, 100 Mbit/s" in output
    assert "At 100 Mbit/s powersgd:rank=4 makes steps" in output
    assert "all-reduce" in output


def test_json_has_every_hook_and_no_number_that_is_not_finite() -> None:
    code, output = run(*SIZE, *FEW, "--rate", "unlimited", "--json", "-")
    assert code == 0, output
    found = json.loads(output, parse_constant=pytest.fail)
    assert {one["hook"] for one in found["hooks"]} == {"all-reduce", "fp16", "powersgd:rank=4"}
    assert found["link"]["rate"] == "inf"
    for one in found["hooks"]:
        assert one["pays"] == (one["speed_up"] > 1)
        assert one["seconds"] == pytest.approx(one["compute"] + one["compression"] + one["waiting"])


def test_what_pays_above_a_rate_is_said_to_in_words_and_json() -> None:
    size = ("--parameters", "1M", "--compute", "50ms", "--ranks", "16", "--latency", "50ms")
    slow = (*size, "--copy-rate", "14GB/s", *AS_THEN)
    code, output = run(*slow, "--rate", "1Gbit/s", "--hook", "top-k:ratio=0.1")
    assert code == 0, output
    assert "above 4.64 Mbit/s" in output
    assert "top-k:ratio=0.1 makes steps 1.70× as fast as dense all-reduce; dense all-reduce is faster below 4.64" in (
        " ".join(output.split())
    )
    assert "None that pays is known to be safe: on digits and gpt each cost more accuracy" in " ".join(output.split())
    _, output = run(*slow, "--rate", "1Gbit/s", "--hook", "top-k:ratio=0.1", "--json", "-")
    one = next(one for one in json.loads(output)["hooks"] if one["hook"] != "all-reduce")
    assert one["pays"] and one["break_even"] is None
    assert one["pays_between"][0][0] == pytest.approx(4.64e6, rel=0.01) and one["pays_between"][0][1] == "inf"
    assert one["accuracy"]["gpt"]["difference"] == of_gpt("top-k:ratio=0.1") > 0.1 and not one["is_safe"]
    _, output = run(*slow, "--rate", "1Mbit/s", "--hook", "top-k:ratio=0.1")
    assert "The first to pay on faster links is top-k:ratio=0.1, above 4.64 Mbit/s" in " ".join(output.split())


def test_the_table_has_what_accuracy_costs_and_names_the_safest_gain() -> None:
    hooks = ("--hook", "powersgd:rank=2", "--hook", "top-k:ratio=0.01", "--hook", "int8")
    code, output = run("--parameters", "25M", "--compute", "200ms", "--copy-rate", "14GB/s", *hooks, *AS_THEN)
    assert code == 0, output
    rows = {line.split()[0]: line.split() for line in output.splitlines() if ":" in line or "int8" in line}
    assert rows["powersgd:rank=2"][-4:] == ["not", "measured"] * 2
    assert rows["top-k:ratio=0.01"][-1] == f"{of_gpt('top-k:ratio=0.01'):+.2f}" > "+0.5"
    assert "The safest gain is int8, 1.79× as fast: on digits and gpt it cost no more accuracy" in output
    assert "gloo (1.02 ns of CPU time a byte)" in output


def test_a_step_that_is_slower_on_a_faster_link_is_named() -> None:
    words = ("--parameters", "25M", "--compute", "200ms", "--ranks", "16", "--copy-rate", "14GB/s", *AS_THEN)
    code, output = run(*words, "--hook", "top-k:ratio=0.1")
    assert code == 0, output
    said = " ".join(output.split())
    assert "On a link 1.25 times as fast these steps are computed to be slower: top-k:ratio=0.1 by 5." in said


def test_a_task_gives_shapes_and_its_step_is_timed() -> None:
    code, output = run("--task", "gpt:size=tiny", "--hook", "fp16", "--json", "-", "--copy-rate", "10GB/s")
    assert code == 0, output
    found = json.loads(output)
    assert found["parameters"] > 10_000
    assert all(one["compute"] > 0 for one in found["hooks"])


def test_numbers_of_parameters_are_read() -> None:
    assert (count_in("124M"), count_in(" 1.5B"), count_in("12")) == (124e6, 1.5e9, 12)


def test_every_registered_name_was_measured_or_left_out_for_a_reason() -> None:
    names = {Spec.parse(hook).name for hook in HOOKS}
    assert names | LEFT_OUT.keys() == COMPRESSORS.keys()
    assert not names & LEFT_OUT.keys()


def test_the_file_of_costs_has_the_hooks_that_are_measured() -> None:
    costs = Costs.read()
    assert list(costs.hooks) == list(HOOKS)
    for hook, own in costs.hooks.items():
        assert own.compressor == str(make_hook(Spec.parse(hook)))
    assert {"processor", "cores", "system"} == costs.machine.keys()


def test_costs_that_were_measured_here_take_the_place_of_those_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs, file = Costs.read(), tmp_path / "costs.json"
    slow = dataclasses.replace(costs.hooks["fp16"], bucket_seconds=100.0)
    monkeypatch.setattr(
        "experiments.estimate.costs.measure",
        lambda plan, tell: dataclasses.replace(costs, hooks={**costs.hooks, "fp16": slow}),
    )
    code, output = run("--measure-costs", str(file))
    assert (code, output.split(" hooks")[0]) == (0, f"{file}: the costs of {len(HOOKS)}")
    _, output = run(*SIZE, "--hook", "fp16", "--costs", str(file))
    assert f"thosein{file}," in "".join(output.split())
    _, output = run(*SIZE, "--hook", "fp16", "--json", "-", "--costs", str(file))
    assert next(one["seconds"] for one in json.loads(output)["hooks"] if one["hook"] == "fp16") > 100


@pytest.mark.parametrize("level", ["avx512", None])
def test_costs_that_were_measured_with_other_passes_than_there_are_here_are_named(
    level: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "costs.json"
    dataclasses.replace(Costs.read(), level=level).write(file)
    assert Costs.read(file).level == level
    monkeypatch.setenv(VARIABLE, "off")
    _, output = run(*SIZE, "--hook", "fp16", "--costs", str(file))
    said = " ".join(output.split())
    assert ("with compiled passes (avx512), times the copy" in said) == (level is not None)
    assert ("here it is otherwise: compiled passes: none, since" in said) == (level is not None)
    assert ("without compiled passes, times the copy" in said) == (level is None)
    _, output = run(*SIZE, "--hook", "fp16", "--json", "-", "--costs", str(file))
    assert json.loads(output)["costs_level"] == level


def test_twenty_configurations_are_compared() -> None:
    pairs = [(world, rate, hook) for world in WORLDS for rate in world.rates for hook in world.hooks[1:]]
    assert len(pairs) == CONFIGURATIONS == 20
    assert all(world.hooks[0] == "all-reduce" for world in WORLDS)


def steps_of(world: World, seconds: dict[str, tuple[float, ...]]) -> StepsAt:
    return StepsAt(world=world, rate=1e9, compute=0.05, optimizer=0.01, seconds=seconds)


def test_a_comparison_counts_what_is_right_and_what_is_not() -> None:
    steps = steps_of(WORLDS[0], {"all-reduce": (0.2, 0.2), "int8": (0.3, 0.3)})
    checked = [Checked(steps, "all-reduce", 0.2, False, ()), Checked(steps, "int8", 0.15, True, ((0.0, 1.5e9),))]
    about = {"machine": {"processor": "a processor", "cores": 2}, "versions": {"torch": "2"}, "copy_rate": 1e10}
    text = page(checked, about)
    assert "Of 2 step times 1 are within 20.0 %" in text
    assert "Of 1 configurations 0 are on the right side" in text
    assert "0 of the 1 whose rate is within a factor of 2" in text
    assert "(undecided: 1 of the 20 configurations were measured)" in text


def test_a_comparison_gives_the_estimate_only_what_was_measured_without_a_link() -> None:
    world = WORLDS[2]
    steps = steps_of(world, dict.fromkeys(world.hooks, (0.1, 0.2, 0.1)))
    found = check([steps], copy_rate=1e10)
    assert [one.hook for one in found] == list(world.hooks)
    assert all(one.estimated > 0.06 and one.measured == 0.1 for one in found)


def test_steps_that_were_measured_just_now_are_read_as_those_of_another_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "measured", lambda world: [steps_of(world, dict.fromkeys(world.hooks, (0.2, 0.1)))])
    study.estimates(measure=True, folder=tmp_path, world=[2])
    table = (tmp_path / "checked.md").read_text()
    study.estimates(folder=tmp_path)
    assert "Of 3 step times" in table and (tmp_path / "checked.md").read_text() == table


@THOROUGH
def test_real_steps_are_taken_in_turns_with_steps_that_send_nothing() -> None:
    # 10 Mbit/s: 218 kB of gradients take 174 ms, beside which a busy machine's noise in the compute is nothing
    world = World(task="gpt:size=tiny", ranks=2, hooks=("all-reduce", "int8"), rates=(1e7,), turns=2, kind="emulated")
    (steps,) = measured(world)
    assert (steps.world, steps.rate) == (world, 1e7)
    assert {hook: len(own) for hook, own in steps.seconds.items()} == {"all-reduce": 2, "int8": 2}
    assert 0 < steps.ready[0] <= steps.ready[-1] <= steps.compute < min(steps.seconds["all-reduce"])
    assert stored.made_of(StepsAt, json.loads(json.dumps(dataclasses.asdict(steps)))) == steps


def test_costs_are_measured_in_steps_for_each_round_and_grow_only_where_answers_do() -> None:
    small, large = Model((32, 32), 16, 1 / 64), Model((64, 64), 16, 1 / 16)
    plan = Plan(
        hooks=("top-k:ratio=0.1", "powersgd:rank=1"),
        matrices=(small, large),
        vector=Model((64,), 16, 1 / 1024),
        split=Model((64, 64), 16, 1 / 64),
        turns=2,
        passes=1,
    )
    found = measure(plan, lambda text: None)
    top_k, powersgd = (found.hooks[hook] for hook in plan.hooks)
    assert [len(sample.rounds) for sample in (*top_k.matrices, top_k.vector)] == [2, 2, 2]
    assert [len(sample.rounds) for sample in powersgd.matrices] == [3, 3]
    assert top_k.growth[0] == 0.0 and powersgd.growth == (0.0, 0.0, 0.0)
    assert make_hook(Spec.parse(plan.hooks[0])) == make_compressor(top_k.compressor)


def test_a_figure_of_several_passes_is_their_median() -> None:
    shipped = Costs.read()
    slow, fast = (scaled(shipped, factor) for factor in (3.0, 0.5))
    assert median_of([slow, shipped, fast]) == shipped
    assert median_of([slow, slow, fast]) == slow


def scaled(costs: Costs, factor: float) -> Costs:
    """Return the costs of a machine that is so many times as slow at all but copies."""

    def sample(one: Sample) -> Sample:
        return Sample(one.elements, tuple(factor * own for own in one.rounds))

    hooks = {
        name: dataclasses.replace(
            own,
            bucket_seconds=factor * own.bucket_seconds,
            matrices=tuple(map(sample, own.matrices)),
            vector=sample(own.vector),
        )
        for name, own in costs.hooks.items()
    }
    return dataclasses.replace(
        costs, hooks=hooks, hop_seconds=factor * costs.hop_seconds, round_seconds=factor * costs.round_seconds
    )
