"""A disk that fills up while a checkpoint is written: path and cause in the error, and nothing else on the disk.

That every rank is told, and the checkpoint before it loads, is in test_checkpoint_files.py.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from commhooks import CheckpointError, load_checkpoint, save_checkpoint
from commhooks.saving.files import read_tensors, write_tensors

BYTES = 1 << 20
MODEL = torch.nn.Linear(4, 4)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse to write beyond so many bytes of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_nothing_lost(root: Path, error: CheckpointError, name: str, cause: int) -> None:
    text = str(error)
    assert f"OSError: [Errno {cause}] {os.strerror(cause)}" in text
    assert re.search(rf": '{root}/\.writing-step-2-by-{os.getpid()}-on-[^/]+/{name}'", text)
    assert [path.name for path in root.iterdir()] == ["checkpoint-00001-step-1"]
    loaded = load_checkpoint(root, model=MODEL)
    assert loaded is not None and loaded.extra == {"first": True}


def test_a_write_that_the_system_refuses_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, step=1, model=MODEL, extra={"first": True})
    with largest_file(BYTES), pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, step=2, model=MODEL, extra={"tensor": torch.ones(BYTES)})
    check_nothing_lost(tmp_path, caught.value, "shared.pt", errno.EFBIG)


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5])  # the last two: its folder, and the folder that it is in
def test_a_disk_that_is_full_only_when_it_flushes_is_named(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, step=1, model=MODEL, extra={"first": True})
    calls = []

    def flush(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", flush)
    with pytest.raises(CheckpointError, match=r"\d+ bytes free") as caught:
        save_checkpoint(tmp_path, step=2, model=MODEL)
    assert f"[Errno {errno.ENOSPC}]" in str(caught.value) and str(tmp_path) in str(caught.value)
    if call <= 3:
        check_nothing_lost(tmp_path, caught.value, ("rank0.pt", "shared.pt", "manifest.json")[call - 1], errno.ENOSPC)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00001-step-1"]


def test_where_only_an_old_checkpoint_cannot_be_removed_the_new_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, step=1, model=MODEL)

    def keep(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", keep)
        with pytest.raises(CheckpointError, match="could not remove older checkpoints. rank 0: PermissionE"):
            save_checkpoint(tmp_path, step=2, model=MODEL, keep=1)
    loaded = load_checkpoint(tmp_path, model=MODEL)
    assert loaded is not None and loaded.step == 2
    save_checkpoint(tmp_path, step=3, model=MODEL, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00003-step-3"]


def test_only_what_a_save_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".removing-checkpoint-00001-step-1").mkdir()
    for name in (".writing-notes.txt", ".removing-"):
        (tmp_path / name).write_text("years of work")
    save_checkpoint(tmp_path, step=1, model=MODEL)
    names = {".writing-notes.txt", ".removing-", "checkpoint-00001-step-1"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_write_that_ends_early_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, write = {"numbers": torch.arange(2000)}, os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:999]))
    write_tensors(tmp_path / "file", whole, flush=False)
    monkeypatch.undo()
    assert torch.equal(read_tensors(tmp_path / "file")["numbers"], whole["numbers"])
