"""What a checkpoint may hold, where it may lie, and which ones are kept; a save that fails leaves the older ones."""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from commhooks import CheckpointError, load_checkpoint, save_checkpoint
from commhooks.saving import checkpoints as checkpoint
from commhooks.saving.contents import read_contents
from commhooks.saving.folder import newest
from tests.commhooks.checkpointed import Network, begin, listing_of, words_of
from tests.commhooks.told import told_by
from tests.ddp_core.facts import Facts

facts = Facts()


@facts
def when_one_rank_cannot_write_every_rank_raises_and_older_checkpoints_stay(rank: int, folder: Path) -> None:
    """Then they can be loaded, and others saved."""
    old, new = "checkpoint-00001-step-3", "checkpoint-00002-step-9"
    run = begin(rank, folder)
    run.save()
    saved = run.digest()
    run.train(1)
    told = {}
    for name, obstacle in _obstacles(rank).items():
        with obstacle:
            told[name] = told_by(run.save).text
        assert listing_of(run) == [old], name
    told["under a file"] = told_by(lambda: run.save(directory=__file__)).text
    assert listing_of(run) == [old]
    told["steps that differ"] = told_by(lambda: run.save(step=5 + rank)).text
    assert listing_of(run) == [old] and told.keys() == CANNOT_BE_WRITTEN.keys()
    for name, text in told.items():
        assert CANNOT_BE_WRITTEN[name] in text, (name, text)
        if name.startswith("disk full"):
            assert f"bytes free): '{folder}/run/.writing-step-4-by-" in text
    run.load()
    assert run.digest() == saved
    run.save(step=9)
    assert listing_of(run) == [old, new]


CANNOT_BE_WRITTEN = {
    "disk full on rank 1": "could not write the checkpoint. rank 1: OSError: [Errno 28] No space left on device (",
    "disk full at the manifest": "could not put the checkpoint in place. rank 0: OSError: [Errno 28] No space left",
    "under a file": "could not prepare the checkpoint. rank 0: ",
    "steps that differ": "ranks disagree about the step: by rank 5, 6.",
}


def _obstacles(rank: int) -> dict[str, Any]:
    full = OSError(errno.ENOSPC, "No space left on device")
    nowhere = contextlib.nullcontext()
    return {
        "disk full on rank 1": mock.patch.object(torch, "save", side_effect=full) if rank == 1 else nowhere,
        "disk full at the manifest": mock.patch.object(Path, "write_text", side_effect=full) if rank == 0 else nowhere,
    }


@facts
def the_newest_checkpoints_are_kept(rank: int, folder: Path) -> None:
    every = [f"checkpoint-0000{number}-step-{10 * (number - 1)}" for number in (1, 2, 3, 4)]
    for keep, left in ((1, every[3:]), (2, every[2:]), (None, every)):
        run = begin(rank, folder, f"keep-{keep}")
        for step in range(4):
            run.save(step=10 * step, keep=keep)
        assert listing_of(run) == left, keep


class Marked(Tensor):
    """A tensor subclass."""


REFUSED: dict[str, Any] = {
    "loss": np.float64(0.5), "name": np.str_("a"), "path": Path("/tmp"),
    "counts": collections.defaultdict(int), "function": print, "nested": [{"deep": {np.int64(1): 2}}],
    "tensor": torch.ones(1).as_subclass(Marked), "frozen": frozenset([1]),
}  # fmt: skip

TAKEN: dict[Any, Any] = {
    "numbers": [1, 2.5, 1 + 2j, True, None], "texts": ("a", b"b", bytearray(b"c")), "set": {1, 2}, 3: torch.float16,
    "shape": torch.Size([2, 3]), "device": torch.device("cpu"), "counts": collections.Counter("aab"),
    "tensors": {"a": torch.arange(3), "b": nn.Parameter(torch.ones(2))}, "order": collections.OrderedDict(a=1),
}  # fmt: skip


def test_of_two_checkpoints_with_one_number_the_later_step_is_the_newest(tmp_path: Path) -> None:
    for step in (10, 9):  # by two processes that saved at the same moment
        (tmp_path / f"checkpoint-00001-step-{step}").mkdir()
    found = newest(tmp_path)
    assert found is not None and found.name == "checkpoint-00001-step-10"


@facts
def extras_that_could_not_be_loaded_are_refused_when_saving(rank: int, folder: Path) -> None:
    """And all others come back."""
    run = begin(rank, folder)
    for name, value in REFUSED.items():
        text = told_by(functools.partial(run.save, extra={name: value})).text
        assert f"['extra']['{name}']" in text and "must be plain data" in text, (name, text)
    assert listing_of(run) == []
    run.save(extra=TAKEN)
    loaded = run.load()
    assert loaded is not None and list(words_of(loaded.extra)) == list(words_of(TAKEN))


@facts
def where_no_whole_checkpoint_is_nothing_is_loaded(rank: int, folder: Path) -> None:
    """Nor where there is another one for each rank."""
    run = begin(rank, folder)
    path = run.save()
    empty, killed = folder / "empty", folder / "killed"
    if rank == 0:
        empty.mkdir()
        shutil.copytree(path, killed / f".writing-{path.name}")
        shutil.copytree(path, killed / f".removing-{path.name}")
    dist.barrier()
    before = run.digest()
    assert [run.load(directory=place) for place in (empty, killed, folder / "nowhere")] == [None, None, None]
    twin = run.save(keep=None)
    seen = path if rank == 0 else twin  # as on hosts that each have a disk of their own under this path
    with mock.patch.object(checkpoint, "read_contents", lambda _, *given: read_contents(seen, *given)):
        text = told_by(functools.partial(run.load, directory=path)).text
    assert "ranks see different checkpoints under" in text and "nothing was loaded" in text
    assert run.digest() == before


@pytest.mark.parametrize("step", [-1, 2.0, True, "3", None])
def test_a_step_that_is_no_number_of_steps_is_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step must be an int of at least 0"):
        save_checkpoint(tmp_path, step=step, model=torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"keep must be at least 1"):
        save_checkpoint(tmp_path, step=1, model=torch.nn.Linear(2, 2), keep=0)


def test_buffers_that_are_no_state_may_have_any_shape(tmp_path: Path) -> None:
    saved, loading = Network(), Network()
    saved.cache, saved.norm.running_mean = torch.ones(3), torch.ones(8)
    save_checkpoint(tmp_path, step=1, model=saved)
    load_checkpoint(tmp_path, model=loading)
    buffers = dict(loading.named_buffers())
    assert torch.equal(buffers["cache"], torch.zeros(8))
    assert torch.equal(buffers["norm.running_mean"], torch.ones(8))


test = facts.tests()
