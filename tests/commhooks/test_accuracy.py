"""What compressors cost in accuracy: the file in the package, and what is safe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import commhooks
from commhooks.compressors import AllReduceMean
from commhooks.experiments.accuracy import Accuracy, Difference, TaskAccuracy
from commhooks.experiments.planning.costs import Costs


def task(
    name: str = "gpt", *, higher_is_better: bool = False, **differences: tuple[float, float, float] | None
) -> TaskAccuracy:
    """Return a task on which seeds of dense all-reduce differ by 0.05."""
    found = tuple(
        Difference(str(commhooks.make_compressor(name)), *(values or (None, None, None)))
        for name, values in differences.items()
    )
    return TaskAccuracy(
        task=name, description="a task", score="loss", unit="nats", higher_is_better=higher_is_better, steps=10,
        seeds=3, seed_range=0.05, fall=2.0, differences=found,
    )  # fmt: skip


def accuracy(*tasks: TaskAccuracy) -> Accuracy:
    return Accuracy(tasks=tasks, workers=4, command="leaderboard", machine="a processor", versions={})


def test_the_file_of_the_package_is_of_compressors_that_can_be_made_and_names_its_run() -> None:
    found = Accuracy.read()
    assert {one.task for one in found.tasks} == {"digits", "gpt"}
    assert "leaderboard" in found.command and found.machine and found.versions["torch"]
    for one in found.tasks:
        assert one.seeds >= 2 and one.seed_range > 0 and one.unit
        made = [commhooks.make_compressor(each.compressor) for each in one.differences]
        assert made[0] == AllReduceMean()
        assert len(set(map(str, made))) == len(made)
        for each in one.differences:
            assert each.mean is None or each.low is None or each.high is None or each.low <= each.mean <= each.high


def test_most_hooks_of_which_tables_know_the_cost_were_measured_and_no_others_have_a_number() -> None:
    found, costs = Accuracy.read(), Costs.read()
    measured = {hook for hook, own in costs.hooks.items() if found.costs_of(own.compressor)}
    assert costs.hooks.keys() - measured == {"powersgd:rank=2", "powersgd:rank=8", "powersgd:rank=32"}
    assert found.costs_of("top-k:ratio=0.02") == (), "other settings lose otherwise"


def test_a_cost_above_a_hundredth_of_the_fall_matters_and_positive_is_worse() -> None:
    found = accuracy(
        task(fp16=(0.0, -0.01, 0.01), int8=(0.03, 0.0, 0.06), sign=None),
        task("digits", higher_is_better=True, fp16=(0.0, -0.03, 0.06), int8=(0.3, -0.01, 0.7)),
    )

    def safe(name: str) -> list[bool]:
        return [cost.high <= cost.margin for cost in found.costs_of(name)]

    assert safe("fp16") == [True, False]
    assert safe("int8") == [False, True]
    assert safe("sign") == [False], "it diverged"
    assert safe("int4") == []
    assert found.costs_of("int8")[1].mean == -0.3


def test_it_survives_its_file_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "accuracy.json"
    found = accuracy(task(fp16=(0.0, -0.04, 0.04), sign=None))
    found.write(path)
    assert Accuracy.read(path) == found
    raw = json.loads(path.read_text())
    for text in ("[]", json.dumps(raw | {"format": 0}), json.dumps(raw | {"tasks": [{"task": "gpt"}]})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"accuracy.json: expected a file of format 1 that the leaderboard wrote"):
            Accuracy.read(path)
