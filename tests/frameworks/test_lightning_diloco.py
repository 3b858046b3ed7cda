"""`TrainWithDiLoCo` in Lightning's own Trainer: what each rank keeps, what is evaluated, and that rounds take place."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from commhooks.integrations.lightning_diloco import TrainWithDiLoCo
from tests.frameworks import lightning_diloco_in_worlds as worlds
from tests.frameworks.launch import ROOT, run_ranks, torchrun
from tests.frameworks.lightning_in_worlds import EPOCHS, STEPS_AN_EPOCH, digest, error_of, run_script
from tests.world import WorldError

pytestmark = pytest.mark.frameworks

EXAMPLE = ROOT / "docs" / "examples" / "lightning_diloco.py"
ERRORS = {
    "another strategy": r"AttachError: TrainWithDiLoCo: DDPStrategy averages .* pass Trainer\(strategy=DiLoCoStrategy",
    "no callback": r"AttachError: DiLoCoStrategy: each rank would train alone; add TrainWithDiLoCo",
    "of the DDP": r"SettingsError: DiLoCoStrategy\(find_unused_parameters=...\)",
    "batch norms": "SettingsError: DiLoCoStrategy: sync_batchnorm=True would communicate in every forward pass",
    "two optimizers": r"SettingsError: TrainWithDiLoCo: DiLoCo takes one optimizer .*\(configure_optimizers returned 2",
    "two callbacks": "RuntimeError: Found more than one stateful callback of type `TrainWithDiLoCo`",
    "no round": "NotAveragedError: TrainWithDiLoCo: training ended after 12 steps of the optimizer, .*100 steps",
    "no argument": "SettingsError: TrainWithDiLoCo: unknown argument rank",
    "spread": r"SettingsError: TrainWithDiLoCo\(world_size='spread'\)",
    "every": r"SettingsError: DiLoCo\(every=0\): every must be an int of at least 1",
    "before fit": "AttachError: TrainWithDiLoCo: there is no DiLoCo before trainer.fit",
    "other settings": "CheckpointError: rank 0: .*every: saved with 4, now 6; pass settings='change'",
    "different saves": "CheckpointError: TrainWithDiLoCo: ranks begin with checkpoints of different saves.*cut short",
    "one resumes": "CheckpointError: TrainWithDiLoCo: .* of different saves .rank 0: .*; rank 1: no checkpoint",
    "lacks a file": "CheckpointError: .*rank 1: .* there is none of its own beside it .*-rank1.pt",
    "no file": "FileNotFoundError: Checkpoint file not found: .*nowhere.ckpt",
    "saved without": r"CheckpointError: .* no state of DiLoCo \(it was saved without TrainWithDiLoCo\)",
    "alone": "AttachError: TrainWithDiLoCo: this run has one process",
}


@pytest.fixture(scope="module")
def whole() -> list[dict[str, dict[str, str]]]:
    """Return for each rank how 12 steps end without interruption."""
    return run_ranks(worlds.uninterrupted, 2)


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, str]]]:
    """Return for each rank how 12 steps end after a stop and a resume."""
    folder = str(tmp_path_factory.mktemp("diloco"))
    with pytest.raises(WorldError) as killed:
        run_ranks(worlds.interrupted, 2, folder)
    assert -9 in {outcome.exit_code for outcome in killed.value.outcomes}, str(killed.value)
    return run_ranks(worlds.resumed, 2, folder)


@pytest.mark.parametrize("setting", worlds.SETTINGS)
def test_ranks_end_with_one_model_and_keep_their_own(whole: list[dict[str, dict[str, str]]], setting: str) -> None:
    first, second = (of_rank[setting] for of_rank in whole)
    assert first["parameters"] == second["parameters"]
    for part in ("optimizer", "generators"):
        assert first[part] != second[part]
    ends_with_a_round = "diloco" not in worlds.SETTINGS[setting]
    assert (first["own"] == second["own"]) == ends_with_a_round
    assert (first["scale"] != second["scale"]) == setting.startswith("fp16"), "one rank's scaler left out a step"


@pytest.mark.parametrize("setting", worlds.SETTINGS)
def test_a_resumed_run_ends_as_an_uninterrupted_one_bit_for_bit(
    whole: list[dict[str, dict[str, str]]], again: list[dict[str, dict[str, str]]], setting: str
) -> None:
    for uninterrupted, resumed in zip(whole, again, strict=True):
        assert resumed[setting] == uninterrupted[setting]


def test_ranks_see_other_samples_and_evaluate_one_model_without_changing_training() -> None:
    ranks = run_ranks(worlds.seen, 2)
    for first, second in zip(*(of_rank["evaluated"]["samples"] for of_rank in ranks), strict=True):
        assert sorted(first + second) == list(range(STEPS_AN_EPOCH * 24)), "each sample once an epoch, on one rank"
    for of_rank in ranks:
        evaluated, without = of_rank["evaluated"], of_rank["not evaluated"]
        for part in ("samples", "trained", "after", "diloco"):
            assert evaluated[part] == without[part], part
        assert len(evaluated["held out"]) == EPOCHS * STEPS_AN_EPOCH + 1, "after each step, and once before"
        assert not set(evaluated["held out"][1:]) & set(evaluated["trained"][1:]), "training is mixed with the copies"
    held_out = [of_rank["evaluated"]["held out"] for of_rank in ranks]
    assert held_out[0] == held_out[1]
    assert len(set(held_out[0])) > 4, "the outer copies move"
    assert ranks[0]["evaluated"]["trained"][1:] != ranks[1]["evaluated"]["trained"][1:]
    assert {of_rank["evaluated"]["after"] for of_rank in ranks} == {held_out[0][-1]}
    assert ranks[0]["evaluated"]["loss"] == ranks[1]["evaluated"]["loss"]


def test_it_saves_after_a_fit_removes_every_ranks_files_and_fits_again(tmp_path: Path) -> None:
    run_ranks(worlds.around_a_fit, 2, str(tmp_path))


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return rank 0's error for everything that cannot work."""
    folder = str(tmp_path_factory.mktemp("refusals"))
    first, second = run_ranks(worlds.refusals, 2, folder)
    assert [name for name in first if first[name].split(":")[0] != second[name].split(":")[0]] == []
    alone = error_of(lambda: worlds.fit(TrainWithDiLoCo(every=4)))
    return {**first, "alone": alone}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_work_says_what_to_do(errors: dict[str, str], case: str) -> None:
    assert re.match(ERRORS[case], errors[case]), errors[case]


def test_other_numbers_of_ranks_keep_their_own_residuals(tmp_path: Path) -> None:
    """4, then 3, then 4 ranks: all begin at the outer copies, and whoever joins has an empty residual."""
    runs: list[list[dict[str, Any]]] = [
        run_ranks(worlds.on_other_ranks, ranks, str(tmp_path), n) for n, ranks in enumerate((4, 3, 4), 1)
    ]
    for before, after in pairwise(runs):
        for rank, of_rank in enumerate(after):
            assert "saved by" in of_rank["told"] and "'keep' to let each rank keep its own" in of_rank["told"]
            begun, ended = of_rank["begun"], before[0]["ended"]
            assert begun["parameters"] == begun["outer"] == ended["outer"]
            assert begun["momentum"] == ended["momentum"]
            if rank < len(before):
                assert begun["residual"] == before[rank]["ended"]["residual"]
            assert begun["is zero"] == (rank >= len(before))
            assert not of_rank["ended"]["is zero"]


def test_the_example_resumes_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    run_ranks(run_script, 2, str(EXAMPLE), "4", str(first))
    run_ranks(run_script, 2, str(EXAMPLE), "2", str(second))
    printed = torchrun(EXAMPLE, "4", cwd=second, timeout=70)
    found = re.findall(r"step 64: held-out loss ([0-9.]+), ([0-9,]+) bytes a step", printed)[0]
    assert float(found[0]) < 1.9 and float(found[1].replace(",", "")) < 3_000, "fp32 gradients are 153,640 bytes"
    for name in ("last.ckpt", "last.ckpt-rank1.pt"):
        ends = [
            torch.load(folder / "checkpoints" / "lightning_diloco" / name, weights_only=True)
            for folder in (first, second)
        ]
        own = [end["callbacks"]["commhooks.TrainWithDiLoCo"] for end in ends]
        for part in ("state_dict", "optimizer_states", "global_step"):
            assert digest(ends[0][part]) == digest(ends[1][part]), part
        for part in ("own", "diloco"):
            assert digest(own[0][part]) == digest(own[1][part]), part
