"""A hook's state goes through torch.distributed.checkpoint. See distributed_checkpoint_in_worlds.py."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests import bounds
from tests.commhooks import distributed_checkpoint_in_worlds as on_every_rank
from tests.commhooks.distributed_checkpoint_in_worlds import ALL, LAID_OUT, SAVED_AT
from tests.commhooks.ranks import run_ranks
from tests.commhooks.workers import largest

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])
in_long_runs_torchs_too = pytest.mark.parametrize("kind", ["core", pytest.param("torch", marks=pytest.mark.soak)])
in_long_runs_ours_too = pytest.mark.parametrize("kind", [pytest.param("core", marks=pytest.mark.soak), "torch"])
SavedBy = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> SavedBy:
    """Return a function from a kind of DDP to the folder that holds its checkpoints."""

    @functools.cache
    def save(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        run_ranks(on_every_rank.saved_in_passing, 2, kind, str(folder))
        return folder

    return save


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("core", "load_distributed"),
        ("torch", "dcp.load"),
        pytest.param("core", "dcp.load", marks=pytest.mark.soak),
        pytest.param("torch", "load_distributed", marks=pytest.mark.soak),
    ],
)
def test_a_run_resumed_from_a_dcp_checkpoint_is_bit_for_bit_the_uninterrupted_one(
    saved_by: SavedBy, kind: str, how: str
) -> None:
    names = list(ALL if how == "load_distributed" else LAID_OUT)
    for found in run_ranks(on_every_rank.resumed, 2, kind, str(saved_by(kind)), how, names):
        assert len(found) == len(names) * len(SAVED_AT)
        assert {name: far for name, far in found.items() if far} == {}


def test_each_ddp_takes_up_the_state_that_was_saved_on_the_other(saved_by: SavedBy) -> None:
    folders = {"core": str(saved_by("torch")), "torch": str(saved_by("core"))}
    for found in run_ranks(on_every_rank.read_from_the_other, 2, folders, check_exit=False):
        assert found == {"core": 0.0, "torch": 0.0}


@both_ddps
def test_every_rank_writes_its_own_residuals_and_nobody_elses(saved_by: SavedBy, kind: str) -> None:
    for step in SAVED_AT:
        written = FileSystemReader(saved_by(kind) / "fp16 with error feedback" / str(step)).read_metadata().storage_data
        files = {index.fqn: place.relative_path for index, place in written.items()}
        for rank in (0, 1):
            own = {name: file for name, file in files.items() if name.startswith(f"hooks.local.rank{rank}.")}
            assert len(own) == 8 and all(file.startswith(f"__{rank}_") for file in own.values()), own


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("core", 1),
        ("torch", 3),
        pytest.param("core", 3, marks=pytest.mark.soak),
        pytest.param("torch", 1, marks=pytest.mark.soak),
    ],
)
def test_dcp_alone_refuses_another_number_of_ranks(saved_by: SavedBy, kind: str, ranks: int) -> None:
    attempts = [(str(saved_by(kind) / name), name, True) for name in ("powersgd", "all-reduce")]
    for by_name in run_ranks(on_every_rank.refused_directly, ranks, kind, attempts):
        for told in by_name:
            if ranks == 1:
                assert told.error == "CheckpointError"
                assert "saved by 2 ranks, loaded by 1; pass world_size='spread'" in told.text
            else:
                assert "RuntimeError: Missing key in checkpoint state_dict: hooks." in told.text
                assert ".rank2" in told.text


@in_long_runs_torchs_too
def test_dcp_alone_refuses_to_leave_anything_behind(saved_by: SavedBy, kind: str, tmp_path: Path) -> None:
    attempts = [(str(saved_by(kind) / "whole bucket"), "whole bucket", True)]
    attempts += [(str(saved_by(kind) / "all-reduce"), "all-reduce", False)]  # a model without its last bias
    for bucketed, another_model in run_ranks(on_every_rank.refused_directly, 2, kind, attempts):
        assert bucketed.error == another_model.error == "CheckpointError"
        assert "the state was read without replicated.0.weight.Q of the bucket, " in bucketed.text
        assert bucketed.text.endswith("read it with commhooks.load_distributed.")
        assert "read without shapes.5.bias, which it held when it was saved" in another_model.text
    for told, far in run_ranks(on_every_rank.waiting_residual, 2, kind, str(tmp_path)):
        assert "read without local.0.weight.residual, local.2.weight.residual" in told.text
        assert far == 0


@in_long_runs_torchs_too
def test_the_sum_of_residuals_is_kept_from_4_ranks_to_2_to_3(tmp_path: Path, kind: str) -> None:
    paths = [str(tmp_path / str(ranks)) for ranks in (4, 2, 3)]
    by_rank: list[list[Tensor]] = []  # what every rank owes of each parameter
    for ranks, source, target in zip((4, 2, 3), [None, *paths], paths, strict=False):
        found = run_ranks(on_every_rank.passed_on, ranks, kind, source, target)
        by_rank.append([torch.stack(owed).double() for owed in zip(*[owed for _, owed in found], strict=True)])
        assert source is None or all(len(files) == {2: 4, 3: 2}[ranks] for files, _ in found)
    for later in by_rank[1:]:
        for before, now in zip(by_rank[0], later, strict=True):
            # Shares are computed in float64, and each is rounded once, to the residual's dtype; they pass on twice.
            rounding = 2 * bounds.unit_roundoff(torch.float32) * largest(before.abs().sum(0))
            assert largest(before.sum(0) - now.sum(0)) <= rounding < largest(before.sum(0))


@in_long_runs_ours_too
def test_what_cannot_be_read_is_refused_on_every_rank_and_changes_nothing(
    saved_by: SavedBy, kind: str, tmp_path: Path
) -> None:
    checkpoint = saved_by(kind) / "powersgd" / str(SAVED_AT[1])
    damaged = damaged_copies(checkpoint, tmp_path)
    for rank, (told, far) in enumerate(run_ranks(on_every_rank.refused_by_us, 2, kind, str(checkpoint), damaged)):
        assert far == 0
        assert {what: one.error for what, one in told.items()} == dict.fromkeys(told, "CheckpointError")
        assert max(one.seconds for one in told.values()) < 5
        expected = {
            "key": "has no hook's state under the key 'hook'; it has hooks, model, optimizer.",
            "one rank": "OSError: the disk is gone",
            "nothing there": "nothing-there cannot be read (FileNotFoundError",
            "no checkpoint": "no-checkpoint cannot be read (FileNotFoundError",
            "metadata cut": "metadata-cut cannot be read (",
            "no metadata at all": "no-metadata-at-all cannot be read (",
            "tensors gone": "tensors-gone cannot be read (FileNotFoundError",
            "tensors cut": "tensors-cut cannot be read (",
        }
        assert told.keys() == expected.keys()
        for what, text in expected.items():
            assert text in told[what].text, (rank, what, told[what])


def test_a_state_without_a_step_tells_of_a_failed_read_at_the_first_bucket(saved_by: SavedBy) -> None:
    checkpoint = str(saved_by("torch") / on_every_rank.HOOK / str(SAVED_AT[0]))
    found = run_ranks(on_every_rank.refused_before_the_first_step, 2, "torch", checkpoint)
    assert [loading.error for loading, _ in found] == ["nothing", "CheckpointError"]
    for _, training in found:
        assert "ranks disagree. loaded state, step: 2 (rank 0)" in training.text


def damaged_copies(checkpoint: Path, folder: Path) -> dict[str, str]:
    names = ("no checkpoint", "metadata cut", "no metadata at all", "tensors gone", "tensors cut")
    paths = {name: folder / name.replace(" ", "-") for name in ("nothing there", *names)}
    paths["no checkpoint"].mkdir()
    for name in names[1:]:
        shutil.copytree(checkpoint, paths[name])
    index, tensors = ".metadata", "__1_0.distcp"
    (paths["metadata cut"] / index).write_bytes((checkpoint / index).read_bytes()[:-500])
    (paths["no metadata at all"] / index).write_bytes(b"something else")
    (paths["tensors gone"] / tensors).unlink()
    (paths["tensors cut"] / tensors).write_bytes((checkpoint / tensors).read_bytes()[:2000])
    return {name: str(path) for name, path in paths.items()}


@pytest.mark.soak
@pytest.mark.timeout(1200)
@both_ddps
@pytest.mark.parametrize("policy", ["fifo", "fused"])
def test_every_compressor_resumes_from_every_step(tmp_path: Path, kind: str, policy: str) -> None:
    for resume in (False, True):
        found = run_ranks(on_every_rank.every_case, 2, kind, policy, str(tmp_path), resume, timeout=600)
    for one in found:
        assert len(one) > 100
        assert {name: far for name, far in one.items() if far} == {}
