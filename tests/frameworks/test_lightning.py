"""`CompressGradients` in Lightning's own Trainer: what it restores, what it refuses, and that it runs at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.frameworks import lightning_in_worlds as worlds
from tests.frameworks.launch import ROOT, raised, run_ranks, torchrun
from tests.world import WorldError

pytestmark = pytest.mark.frameworks

EXAMPLE = ROOT / "docs" / "examples" / "lightning_ddp.py"
ERRORS = {
    "own argument": "SettingsError: CompressGradients: DDPStrategy\\(ddp_comm_hook=...\\) is set too",
    "own argument, ddp_core": "SettingsError: DDPCoreStrategy: ddp_comm_hook is set too",
    "not DDP": "AttachError: CompressGradients: Local does not train with a DistributedDataParallel",
    "did not run": "NotAveragedError: SGD took a step on gradients of",
    "other settings": "CheckpointError: rank 0: .* setting inner.compressor: saved with PowerSGD, now TwoHop",
    "before fit": "AttachError: CompressGradients: nothing is attached before trainer.fit",
    "refused": "CheckpointError: .*saved by 2 ranks, loaded by 3; pass world_size='spread'",
    "alone": "AttachError: CompressGradients: this run has one process",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, dict[str, str]], ...]]:
    """Return for each rank how 12 steps end without interruption, and after a stop and a resume."""
    folder = str(tmp_path_factory.mktemp("lightning"))
    with pytest.raises(WorldError) as killed:
        run_ranks(worlds.interrupted, 2, folder)
    assert -9 in {outcome.exit_code for outcome in killed.value.outcomes}, str(killed.value)
    return list(zip(run_ranks(worlds.uninterrupted, 2), run_ranks(worlds.resumed, 2, folder), strict=True))


@pytest.mark.parametrize("setting", worlds.SETTINGS)
def test_a_resumed_run_ends_as_an_uninterrupted_one_bit_for_bit(
    runs: list[tuple[dict[str, dict[str, str]], ...]], setting: str
) -> None:
    for uninterrupted, resumed in runs:
        assert resumed[setting] == uninterrupted[setting]


def test_a_run_resumed_without_the_state_of_the_hook_ends_otherwise(
    runs: list[tuple[dict[str, dict[str, str]], ...]],
) -> None:
    for uninterrupted, resumed in runs:
        assert resumed["without its state"]["parameters"] != uninterrupted["plain"]["parameters"]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return rank 0's error for everything that cannot work."""
    folder = str(tmp_path_factory.mktemp("refusals"))
    found = run_ranks(worlds.refusals, 2, folder)[0] | run_ranks(worlds.on_other_ranks, 3, folder)[0]
    found["alone"] = raised(lambda: worlds.fit(worlds.trainer_with(worlds.compress())))
    return dict(found)


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_work_says_what_to_do(errors: dict[str, str], case: str) -> None:
    assert re.match(ERRORS[case], errors[case]), errors[case]


def test_lightning_still_ignores_its_own_argument_on_the_cpu_as_the_page_says(errors: dict[str, str]) -> None:
    assert errors["own argument alone"] == "nothing"


def test_it_logs_saves_and_fits_again(tmp_path: Path) -> None:
    run_ranks(worlds.around_a_fit, 2, str(tmp_path))


def test_a_trainer_of_the_older_package_takes_it_too() -> None:
    assert run_ranks(worlds.under_the_older_name, 2) == [3, 3]


def test_the_example_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    for epochs in ("2", "4"):
        printed = torchrun(EXAMPLE, epochs, cwd=tmp_path, timeout=70)
    assert float(re.findall("([0-9.]+) times fewer", printed)[0]) > 10, printed
    end = torch.load(tmp_path / "checkpoints" / "lightning_ddp" / "last.ckpt", weights_only=True)
    assert end["epoch"] == 3
    assert end["callbacks"]["commhooks.CompressGradients"]["local"].keys() == {"rank0", "rank1"}


def test_the_example_of_a_sharded_model_compresses() -> None:
    printed = torchrun(ROOT / "docs" / "examples" / "lightning_sharded.py", timeout=70)
    assert re.search("^32 steps, messages 3.9 times smaller", printed, re.MULTILINE), printed
