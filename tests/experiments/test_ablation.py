"""An ablation: which runs it makes and makes again, and what its tables and sentences say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from commhooks.experiments.hooks import make_hook
from commhooks.experiments.report.plots import LIGHT
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.tasks.images import ResNet18
from commhooks.lockstep import average_in_lockstep
from experiments.studies.blocks import Picture, Table
from experiments.studies.lockstep import ACCURACY, LOSS, join_workers
from experiments.studies.reproduce.ablation import Ablation, Trial, train_variants
from experiments.studies.reproduce.comparing import between, compare, draw_differences, findings, show_ablation, table
from experiments.studies.reproduce.notes import Notes

TASK = "digits:size=tiny,steps=3"
ABLATION = Ablation(
    tasks=("digits",),
    variants={"SGD": "all-reduce", "low": "powersgd:rank=1", "lower": "powersgd:rank=1,error_feedback=false"},
    seeds=3,
)
FEW = Ablation(tasks=(TASK,), variants={"SGD": "all-reduce", "half": "fp16"}, seeds=2, workers=2, processes=1)


def rows(scores: Mapping[str, tuple[float, ...]], task: str = "digits") -> list[dict[str, Any]]:
    """Return made-up runs with these accuracies, or losses, for seeds 0, 1, ..."""
    return [
        {"task": task, "variant": variant, "seed": seed, "accuracy": value, "loss": value}
        | {"diverged": None, "payload_bytes": 2500.0}
        for variant, values in scores.items()
        for seed, value in enumerate(values)
    ]


SCORES = {"SGD": (0.9, 0.95, 0.98), "low": (0.901, 0.951, 0.975), "lower": (0.801, 0.856, 0.87)}


def notes(folder: Path, said: list[str] | None = None) -> Notes:
    return Notes(folder, {"name": "few"}, (list[str]() if said is None else said).append)


def test_a_task_may_be_trained_under_another_optimizer() -> None:
    still = f"{TASK} under sgd:lr=0.0"
    trials = [Trial(task=task, variant="SGD", hook="all-reduce", seed=0, workers=2) for task in (still, TASK)]
    kept, moved = (trial.run()["loss"] for trial in trials)
    assert kept == load_task(TASK, 0).evaluate()["loss"] != moved
    assert findings(compare(ABLATION, rows(SCORES, task=still), still)).startswith("On digits under sgd:")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tasks": (TASK, f"{TASK} under sgd:rate=0.1")}, "setting 'rate' is not known"),
        ({"variants": {"SGD": "all-reduce", "low": "powersgd:rnk=1"}}, "rnk"),
    ],
)
def test_a_mistake_is_an_error_before_the_first_run(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    said: list[str] = []
    with pytest.raises(ValueError, match=words):
        train_variants(dataclasses.replace(FEW, **change), notes(tmp_path, said))
    assert not said


def test_differences_are_taken_seed_by_seed_and_said_in_a_sentence() -> None:
    compared = compare(ABLATION, rows(SCORES), "digits")
    assert findings(compared) == (
        "On digits:\n\n"
        "- No difference seen between low and SGD: -0.10 points (-0.96 to +0.76, 3 seeds).\n"
        "- With lower, accuracy is 10.10 points lower than with SGD (8.07 to 12.13, 3 seeds)."
    )
    assert [row[-1] for row in table(ABLATION, compared).rows] == ["—", "none seen", "worse"]
    of_losses = compare(ABLATION, rows(SCORES, task="lstm"), "lstm")
    assert of_losses[0].score is LOSS and "validation loss is 0.101 nats lower than with SGD" in findings(of_losses)
    assert [row[-1] for row in table(ABLATION, of_losses).rows] == ["—", "none seen", "better"]


@pytest.mark.parametrize("change", [{"diverged": 31}, {"loss": None}])
def test_a_run_that_diverged_is_counted_and_leaves_no_mean(change: Mapping[str, Any]) -> None:
    made = rows(SCORES)
    made[4] |= change  # of "low", the second seed
    compared = compare(ABLATION, made, "digits")
    assert "1 of 3 runs with low diverged" in findings(compared)
    assert table(ABLATION, compared).rows[1][2:4] == ["1 of 3 diverged", "—"]
    assert "nan" not in str(table(ABLATION, compared)) + findings(compared)
    assert between(made, ACCURACY, "low", "SGD") is None
    others = between(made, ACCURACY, "lower", "SGD")
    assert others is not None and others.mean == pytest.approx(-10.1)  # of 9.9, 9.4 and 11 points
    draw = partial(draw_differences, ABLATION, made)
    lost = compare(ABLATION, [*({**row, **change} for row in made[:3]), *made[3:]], "digits")
    assert "Lower cannot be compared with SGD, of which runs diverged" in findings(lost)
    assert Picture("differences", "", draw).png(LIGHT).startswith(b"\x89PNG")


def test_the_runs_of_a_seed_have_the_same_data_and_finished_ones_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    first = train_variants(
        dataclasses.replace(FEW, variants={"SGD": "all-reduce", "again": "all-reduce"}), notes(tmp_path)
    )
    by_variant = [[row["loss"] for row in first["runs"] if row["variant"] == label] for label in ("SGD", "again")]
    assert by_variant[0] == by_variant[1] and by_variant[0][0] != by_variant[0][1]
    made = train_variants(FEW, notes(tmp_path, said))
    assert made["runs"][:2] == first["runs"][:2]
    assert len(said) == 1 + 2 and "half" in said[1] and "half" in said[2]  # the first says that it continues
    monkeypatch.setattr("experiments.studies.reproduce.ablation.run_jobs", None)  # nothing is left to do
    assert train_variants(FEW, notes(tmp_path)) == made
    blocks = show_ablation(FEW, made)
    assert isinstance(blocks[0], Table) and "100" not in str(blocks[0].rows[1][3])


@pytest.mark.parametrize(("hook", "floats"), [("all-reduce", 11_173_962), ("rank=1", 45_935), ("rank=7", 263_885)])
def test_two_workers_send_as_much_for_resnet18_as_the_powersgd_paper_says(hook: str, floats: int) -> None:
    hook = hook if hook == "all-reduce" else f"powersgd:min_compression_rate=1,{hook}"
    model = ResNet18()
    exchangers = join_workers(model, make_hook(Spec.parse(hook)), 2)
    average_in_lockstep(exchangers, [{name: torch.ones_like(p) for name, p in model.named_parameters()}] * 2)
    assert exchangers[0].statistics().payload_bytes == 4 * floats
