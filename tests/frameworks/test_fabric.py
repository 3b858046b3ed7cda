"""`compress` with Lightning Fabric's own objects: what it restores, what it refuses, and that it runs at all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.frameworks import fabric_in_worlds as worlds
from tests.frameworks.launch import ROOT, run_ranks
from tests.frameworks.lightning_in_worlds import digest, error_of, run_script
from tests.world import WorldError

pytestmark = pytest.mark.frameworks

EXAMPLE = ROOT / "docs" / "examples" / "fabric_ddp.py"
ERRORS = {
    "not set up": "AttachError: .*expected what fabric.setup.* returned.* \\(got Sequential and DDPStrategy\\)",
    "not DDP": "AttachError: .*\\(got _FabricModule around Sequential and Local\\); pass Fabric\\(strategy=",
    "twice": "AttachError: attach: ErrorFeedback.* is attached to this model already",
    "saved without": "KeyError: .*'hooks' that does not exist in the loaded checkpoint",
    "did not run": "NotAveragedError: SGD is about to take a step on gradients of",
    "after end": "CheckpointError: .*nothing is attached",
    "refused": "CheckpointError: .*saved by 2 ranks, loaded by 3; pass world_size='spread'",
    "alone": "AttachError: .*this run has one process",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, dict[str, str]], ...]]:
    """Return for each rank how 12 steps end without interruption, and after a kill and a resume."""
    folder = str(tmp_path_factory.mktemp("fabric"))
    with pytest.raises(WorldError) as killed:
        run_ranks(worlds.interrupted, 2, folder)
    assert {outcome.exit_code for outcome in killed.value.outcomes} == {-9}, str(killed.value)
    return list(zip(run_ranks(worlds.uninterrupted, 2), run_ranks(worlds.resumed, 2, folder), strict=True))


@pytest.mark.parametrize("setting", worlds.SETTINGS)
def test_a_resumed_run_ends_as_an_uninterrupted_one_bit_for_bit(
    runs: list[tuple[dict[str, dict[str, str]], ...]], setting: str
) -> None:
    for uninterrupted, resumed in runs:
        assert resumed[setting] == uninterrupted[setting]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return rank 0's error for everything that cannot work."""
    folder = str(tmp_path_factory.mktemp("refusals"))
    found = run_ranks(worlds.refusals, 2, folder)[0] | run_ranks(worlds.on_other_ranks, 3, folder)[0]
    return {**found, "alone": error_of(worlds.Run)}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_work_says_what_to_do(errors: dict[str, str], case: str) -> None:
    assert re.match(ERRORS[case], errors[case], re.S), errors[case]


def test_the_example_resumes_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, epochs in ((first, "4"), (second, "2"), (second, "4")):
        folder.mkdir(exist_ok=True)
        run_ranks(run_script, 2, str(EXAMPLE), epochs, str(folder))
    ends = [
        torch.load(folder / "checkpoints" / "fabric_ddp" / "last.ckpt", weights_only=True) for folder in (first, second)
    ]
    assert ends[0]["hooks"]["local"].keys() == {"rank0", "rank1"}
    for part in ("model", "optimizer", "epoch"):
        assert digest(ends[0][part]) == digest(ends[1][part]), part
    for part in ("local", "replicated", "step"):
        assert digest(ends[0]["hooks"][part]) == digest(ends[1]["hooks"][part]), part
