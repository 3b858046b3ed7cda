"""Two attempts of one job that save into one directory at once, as when a job is started again before its first end.

What one has saved loads, whatever the other writes, removes and leaves behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
import ddp_core
from commhooks import CheckpointError, Handle, LoadRules, load_checkpoint, save_checkpoint
from commhooks.saving.folder import checkpoints_in
from commhooks.saving.rank_files import load_rank_files, save_rank_files
from commhooks.saving.writer import Writer
from tests.world import on_ranks, run_world
from tests.world.launcher import context, ensure_server

RANKS = 2
PLAIN = nn.Linear(4, 4)


# --- saving and loading at once ---------------------------------------------------------------------------------------


def save_and_load(_: int, attempt: int, root: Path, saves: int, keep: int | None, same_steps: bool) -> Counter[str]:
    """Save in a loop, and load each time, by the path and by the directory; return what happened how often."""
    model = ddp_core.DistributedDataParallel(nn.Linear(16, 16))
    happened: Counter[str] = Counter()
    for number in range(saves):
        extra = {"attempt": attempt, "number": number}
        step = number if same_steps else 2 * number + attempt
        path = save_checkpoint(root, step=step, model=model, extra=extra, keep=keep, flush=False)
        try:
            loaded = load_checkpoint(path, model=model)
            happened["loaded by its path"] += loaded is not None and loaded.extra == extra
        except CheckpointError:
            happened["made room for newer ones"] += keep is not None and not path.exists()
        latest = load_checkpoint(root, model=model)
        happened["loaded by the directory"] += latest is not None
    return happened


def in_two_attempts(act: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function on all ranks of two worlds at once, as `act(rank, attempt, ...)`; return what each returned."""
    happened: list[Any] = []

    def attempt(number: int) -> None:
        first, *others = run_world(act, RANKS, number, *arguments, timeout=600)
        assert others == [first] * len(others)
        happened.append(first)

    attempts = [threading.Thread(target=attempt, args=(number,)) for number in range(2)]
    for one in attempts:
        one.start()
    for one in attempts:
        one.join()
    assert len(happened) == 2, "an attempt failed"
    return happened


@pytest.mark.parametrize(("keep", "same_steps"), [(None, True), (2, False)])
def test_what_two_attempts_save_at_once_loads(keep: int | None, same_steps: bool, tmp_path: Path) -> None:
    saves = 12
    total = sum(in_two_attempts(save_and_load, tmp_path, saves, keep, same_steps), Counter[str]())
    assert total["loaded by its path"] + total["made room for newer ones"] == 2 * saves, total
    assert total["loaded by the directory"] == 2 * saves
    assert len(list(tmp_path.iterdir())) == (2 * saves if keep is None else keep)
    for path in checkpoints_in(tmp_path):
        assert load_checkpoint(path, model=nn.Linear(16, 16)) is not None


@on_ranks(RANKS)
@pytest.mark.parametrize("reader", range(RANKS))
def test_a_load_whose_checkpoint_is_removed_meanwhile_takes_the_next_one(
    rank: int, reader: int, tmp_path: Path
) -> None:
    """On every rank, whichever of them noticed; one that is named is not replaced by another."""
    model = ddp_core.DistributedDataParallel(nn.Linear(4, 4))
    first = save_checkpoint(tmp_path / "run", step=1, model=model)
    second = save_checkpoint(tmp_path / "elsewhere", step=2, model=model)
    original = torch.load

    def load_late(*arguments: Any, **settings: Any) -> Any:
        if rank == reader and first.exists():  # what a save of another attempt does
            second.rename(tmp_path / "run" / "checkpoint-00002-step-2")
            first.rename(tmp_path / "run" / f".removing-{first.name}")
            shutil.rmtree(tmp_path / "run" / f".removing-{first.name}")
        return original(*arguments, **settings)

    with mock.patch.object(torch, "load", load_late):
        loaded = load_checkpoint(tmp_path / "run", model=model)
    assert loaded is not None and (loaded.step, loaded.path.name) == (2, "checkpoint-00002-step-2")
    with pytest.raises(CheckpointError, match="manifest.json cannot be read"):
        load_checkpoint(first, model=model)


def test_a_load_whose_checkpoints_are_removed_faster_than_it_reads_gives_up(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, step=1, model=PLAIN)
    original = torch.load

    def load_late(*arguments: Any, **settings: Any) -> Any:
        save_checkpoint(tmp_path, step=2, model=PLAIN, keep=1, flush=False)
        return original(*arguments, **settings)

    with (
        mock.patch.object(torch, "load", load_late),
        pytest.raises(CheckpointError, match=rf"checkpoints in {tmp_path} were removed while they were read, 10 of"),
    ):
        load_checkpoint(tmp_path, model=PLAIN)


# --- in the folder of a framework -------------------------------------------------------------------------------------


def compressed(rank: int) -> Handle[Any]:
    """Return the hook of a model that has taken a step, with a residual that differs between ranks."""
    torch.manual_seed(0)
    model = ddp_core.DistributedDataParallel(nn.Linear(16, 16))
    attachment = commhooks.attach(model, "top-k")
    model(torch.full((4, 16), 1.0 + rank)).square().mean().backward()
    return attachment


def save_beside_the_model(rank: int, _: int, folder: Path, saves: int) -> int:
    attachment = compressed(rank)
    for _ in range(saves):
        save_rank_files(folder, "hook", attachment)
    return attachment.steps


def load_beside_the_model(rank: int, folder: Path) -> None:
    attachment = compressed(rank)
    load_rank_files(folder, "hook", attachment, LoadRules())


@pytest.mark.parametrize("saves", [12, pytest.param(450, marks=pytest.mark.soak)])
def test_what_two_attempts_save_beside_a_framework_s_model_is_of_one_save(saves: int, tmp_path: Path) -> None:
    assert in_two_attempts(save_beside_the_model, tmp_path, saves) == [1, 1]
    run_world(load_beside_the_model, RANKS, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hook-rank0.pt", "hook-rank1.pt"]


@on_ranks(RANKS)
def test_a_save_beside_a_framework_s_model_that_is_mixed_again_and_again_names_the_other(
    rank: int, tmp_path: Path
) -> None:
    """Another save's file is in the place of rank 0's whenever that has put its own there."""
    attachment, original = compressed(rank), Path.replace
    save_rank_files(tmp_path / "other", "hook", attachment)

    def replace(self: Path, target: Path) -> Path:
        path = original(self, target)
        if rank == 0:
            shutil.copy(tmp_path / "other" / target.name, target.with_name("hook-rank0.pt"))
        return path

    told = pytest.raises(CheckpointError, match="were replaced 10 times while they were saved, the last time by")
    with mock.patch.object(Path, "replace", replace), told:
        save_rank_files(tmp_path / "one", "hook", attachment)


@on_ranks(RANKS)
def test_a_save_beside_a_framework_s_model_that_fails_leaves_the_one_before(rank: int, tmp_path: Path) -> None:
    """And one that was killed leaves a part that the next one removes."""
    attachment = compressed(rank)
    save_rank_files(tmp_path, "hook", attachment)
    before = (tmp_path / f"hook-rank{rank}.pt").read_bytes()
    full = mock.patch.object(torch, "save", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with full if rank == 1 else contextlib.nullcontext(), pytest.raises(CheckpointError, match="rank 1: OSError"):
        save_rank_files(tmp_path, "hook", attachment)
    assert (tmp_path / f"hook-rank{rank}.pt").read_bytes() == before
    left = tmp_path / f"hook-rank{rank}.{dataclasses.replace(Writer.here(), pid=2**22 + 1).mark('0' * 32)}.part"
    left.touch()
    save_rank_files(tmp_path, "hook", attachment)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hook-rank0.pt", "hook-rank1.pt"]


# --- what a killed attempt leaves -------------------------------------------------------------------------------------


def start(act: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    ensure_server()
    process = context.Process(target=act, args=arguments)
    process.start()
    return process


def save_once(root: Path, step: int, keep: int | None) -> None:
    save_checkpoint(root, step=step, model=PLAIN, keep=keep, flush=False)


def save_slowly(root: Path, may_end: Path) -> None:
    """Save one checkpoint, whose files are written but not flushed before the file `may_end` exists."""
    original = os.fsync

    def wait(descriptor: int) -> None:
        while not may_end.exists():
            time.sleep(0.01)
        original(descriptor)

    with mock.patch.object(os, "fsync", wait):
        save_checkpoint(root, step=7, model=PLAIN, extra={"slow": True}, keep=None)


def wait_for(root: Path, process: ForkServerProcess) -> Path:
    """Return the folder in which a process writes, once it has begun to."""
    deadline = time.monotonic() + 30
    while True:
        for path in root.glob(f".writing-*-by-{process.pid}-on-*"):
            if (path / "rank0.pt").exists():
                return path
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.processes
def test_a_killed_save_is_cleared_away_and_a_living_one_is_not(tmp_path: Path) -> None:
    """However many checkpoints another process saves meanwhile; that one's is then the newest."""
    root, may_end = tmp_path / "run", tmp_path / "may-end"
    killed = start(save_slowly, root, may_end)
    left = wait_for(root, killed)
    killed.kill()
    killed.join(30)
    save_once(root, 1, 2)
    assert not left.exists()
    slow = start(save_slowly, root, may_end)
    writing = wait_for(root, slow)
    for step in range(2, 6):
        save_once(root, step, 2)
    assert writing.exists()
    may_end.touch()
    slow.join(30)
    assert slow.exitcode == 0
    loaded = load_checkpoint(root, model=PLAIN)
    assert loaded is not None and loaded.extra == {"slow": True}
    assert not any(root.glob(".*"))


@pytest.mark.parametrize("still_saves", [True, False])
@pytest.mark.processes
def test_a_save_that_another_process_breaks_names_it(still_saves: bool, tmp_path: Path) -> None:
    """What was there before still loads, and the next save succeeds."""
    root, may_end = tmp_path / "run", tmp_path / "may-end"
    save_checkpoint(root, step=1, model=PLAIN)
    others: list[ForkServerProcess] = []
    original = os.fsync

    def lose(descriptor: int) -> None:
        if not others:
            next(root.glob(".writing-*")).rename(tmp_path / "lost")
            if still_saves:
                others.append(start(save_slowly, root, may_end))
                wait_for(root, others[0])
            else:
                others.append(start(save_once, root, 2, 2))
                others[0].join(30)
        original(descriptor)

    with mock.patch.object(os, "fsync", lose), pytest.raises(CheckpointError) as caught:
        save_checkpoint(root, step=3, model=PLAIN)
    assert f"Others that have been saving into {root}: process {others[0].pid} on " in str(caught.value)
    loaded = load_checkpoint(root, model=PLAIN)
    assert loaded is not None and loaded.step == (1 if still_saves else 2)
    save_checkpoint(root, step=4, model=PLAIN)
    may_end.touch()
    others[0].join(30)
    assert others[0].exitcode == 0


# --- killed in the middle of a save -----------------------------------------------------------------------------------


def save_in_a_loop(root: Path, told: Path) -> None:
    """Save until killed, and write down the name of each checkpoint whose save has returned."""
    model = nn.Linear(100, 100)
    loaded = load_checkpoint(root, model=model)
    step = 0 if loaded is None else loaded.step
    with told.open("a") as file:
        while True:
            step += 1
            file.write(save_checkpoint(root, step=step, model=model, extra={"step": step}).name + "\n")
            file.flush()


def number_of(name: str) -> int:
    return int(name.split("-")[1])


@pytest.mark.processes
@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.soak)])
def test_the_last_save_that_returned_loads_after_kills(kills: int, tmp_path: Path) -> None:
    """Another process saves in the same directory in half of the lives."""
    root, told, chance = tmp_path / "run", tmp_path / "told", random.Random(kills)
    told.touch()
    happened: Counter[str] = Counter()
    while happened["killed while saving"] < kills:
        attempts = [start(save_in_a_loop, root, told) for _ in range(chance.choice([1, 2]))]
        wait_for(root, attempts[-1])
        time.sleep(chance.uniform(0, 0.03))
        for process in attempts:
            process.kill()
        for process in attempts:
            process.join(30)
            happened["killed while saving"] += any(root.glob(f".writing-*-by-{process.pid}-on-*"))
        model = nn.Linear(100, 100)
        loaded = load_checkpoint(root, model=model)
        assert loaded is None or loaded.extra == {"step": loaded.step}
        last = max(told.read_text().split(), key=number_of, default="")
        assert last == "" or (loaded is not None and number_of(loaded.path.name) >= number_of(last)), (loaded, last)
        if (root / last / "manifest.json").exists():  # no newer ones have taken its room
            assert load_checkpoint(root / last, model=model) is not None
            happened["loaded the last save that returned"] += 1
    save_checkpoint(root, step=0, model=model)
    assert not any(root.glob(".*"))
    print("\n", dict(happened))
