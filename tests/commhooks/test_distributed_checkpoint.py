"""A hook's state goes through torch.distributed.checkpoint. See distributed_checkpoint_in_worlds.py."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.commhooks import distributed_checkpoint_in_worlds as on_every_rank
from tests.commhooks.distributed_checkpoint_in_worlds import LAID_OUT, SAVED_AT
from tests.commhooks.ranks import run_ranks

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])
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


@both_ddps
@pytest.mark.parametrize("how", ["dcp.load", "load_distributed"])
def test_a_run_resumed_from_a_dcp_checkpoint_is_bit_for_bit_the_uninterrupted_one(
    saved_by: SavedBy, kind: str, how: str
) -> None:
    for found in run_ranks(on_every_rank.resumed, 2, kind, str(saved_by(kind)), how, LAID_OUT):
        assert len(found) == len(LAID_OUT) * len(SAVED_AT)
        assert {name: far for name, far in found.items() if far} == {}


def test_state_that_depends_on_buckets_is_read_by_load_distributed_and_with_ddp_cores_buckets_the_run_too(
    saved_by: SavedBy,
) -> None:
    for kind in ("core", "torch"):
        given = (kind, str(saved_by(kind)))
        assert run_ranks(on_every_rank.read_again, 2, *given, "whole bucket") == [0.0, 0.0]
    found = run_ranks(on_every_rank.resumed, 2, "core", str(saved_by("core")), "load_distributed", ["whole bucket"])
    assert [far for one in found for far in one.values()] == [0.0] * 2 * len(SAVED_AT)


@both_ddps
def test_every_rank_writes_its_own_residuals_and_nobody_elses(saved_by: SavedBy, kind: str) -> None:
    for step in SAVED_AT:
        written = FileSystemReader(saved_by(kind) / "fp16 with error feedback" / str(step)).read_metadata().storage_data
        files = {index.fqn: place.relative_path for index, place in written.items()}
        for rank in (0, 1):
            own = {name: file for name, file in files.items() if name.startswith(f"hooks.local.rank{rank}.")}
            assert len(own) == 8 and all(file.startswith(f"__{rank}_") for file in own.values()), own


@both_ddps
@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, "saved by 2 ranks, loaded by 1; pass world_size='spread'"),
        (3, "Missing key in checkpoint state_dict: hooks.inventory.rank2"),
    ],
)
def test_dcp_alone_refuses_another_number_of_ranks(saved_by: SavedBy, kind: str, ranks: int, expected: str) -> None:
    for name in ("powersgd", "all-reduce"):
        given = (kind, str(saved_by(kind) / name), name, True)
        for told in run_ranks(on_every_rank.refused_directly, ranks, *given):
            assert expected in told.text or (ranks == 3 and "Missing key" in told.text and "rank2" in told.text), told


@both_ddps
def test_dcp_alone_refuses_to_leave_anything_behind(saved_by: SavedBy, kind: str, tmp_path: Path) -> None:
    bucketed = (kind, str(saved_by(kind) / "whole bucket"), "whole bucket", True)
    for told in run_ranks(on_every_rank.refused_directly, 2, *bucketed):
        assert told.error == "CheckpointError" or "of the bucket" in told.text, told
    another_model = (kind, str(saved_by(kind) / "all-reduce"), "all-reduce", False)
    for told in run_ranks(on_every_rank.refused_directly, 2, *another_model):
        assert told.error == "CheckpointError", told
        assert "read without shapes.5.bias, which the checkpoint holds" in told.text
    for told, far in run_ranks(on_every_rank.waiting_residual, 2, kind, str(tmp_path)):
        assert "read without local.0.weight.residual, local.2.weight.residual" in told.text
        assert told.text.endswith("read it with commhooks.load_distributed.") and far == 0


@both_ddps
def test_the_sum_of_residuals_is_kept_from_4_ranks_to_2_to_3(tmp_path: Path, kind: str) -> None:
    paths = [str(tmp_path / str(ranks)) for ranks in (4, 2, 3)]
    sums: list[list[Tensor]] = []
    for ranks, source, target in zip((4, 2, 3), [None, *paths], paths, strict=False):
        found = run_ranks(on_every_rank.passed_on, ranks, kind, source, target)
        sums.append([sum(owed) for owed in zip(*[owed for _, owed in found], strict=True)])
        assert source is None or all(len(files) == {2: 4, 3: 2}[ranks] for files, _ in found)
    for later in sums[1:]:
        for before, now in zip(sums[0], later, strict=True):
            assert float(before.abs().max()) > 1e-3
            assert float((before - now).abs().max()) < 1e-6


@both_ddps
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
