"""The harness itself: results, failures, deaths, hangs, and what is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.tiers import thorough
from tests.waiting import has_ended, until
from tests.world import WorldError, launcher, on_ranks, run_world, run_world_outcomes
from tests.world.launcher import ROOT


def raise_on(rank: int, which: int) -> int:
    if rank == which:
        raise ValueError(f"rank {rank} says no")
    dist.barrier()
    return rank


def hang_on(rank: int, which: int) -> int:
    if rank == which:
        an_unmistakable_place()
    return rank


def an_unmistakable_place() -> None:
    time.sleep(600)


class AbortsWhenDropped:
    def __del__(self) -> None:
        ctypes.CDLL(None).abort()


def abort_at_exit(rank: int) -> int:
    sys.modules["kept until the interpreter ends"] = AbortsWhenDropped()  # type: ignore[assignment]
    return rank


def abort_in_a_destructor(rank: int) -> None:
    libc = ctypes.CDLL(None)
    libc.on_exit(libc.abort, None)


def left_hook(*_: object) -> None:
    pass


def leave_things(rank: int) -> int:
    threading.Thread(target=time.sleep, args=(600,), name="one that stays", daemon=True).start()
    torch.set_default_dtype(torch.float64)
    register_optimizer_step_pre_hook(left_hook)
    return rank


def sleeping_world(rank: int, file: str) -> None:
    held_back = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    Path(f"{file}.{rank}").write_text(f"{os.getpid()} {len(held_back)}")
    time.sleep(600)


@on_ranks(2)
def its_own_rank(rank: int) -> int:
    return rank


@on_ranks(2)
def wrong_on_the_second(rank: int, text: str) -> None:
    dist.barrier()  # the other may still be making the process group, and would fail there
    assert f"rank {rank}" in text


def test_a_decorated_function_fails_where_an_assertion_does_and_shows_its_values() -> None:
    with pytest.raises(WorldError, match="wrong_on_the_second on 2 ranks failed\n(.|\n)*rank 1: raised") as caught:
        wrong_on_the_second(text="rank 0")
    assert caught.value.outcomes[0].ok
    assert "    rank = 1\n    text = 'rank 0'" in str(caught.value)


def abort_beside(rank: int, kind: str) -> int:
    return abort_at_exit(rank)


def test_exits_are_checked_in_the_first_world_of_a_file_or_in_all_but_not_with_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_EXITS", "")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/of_another_kind.py::test (call)")
    monkeypatch.setattr(launcher, "_files_checked", set())
    assert run_world(abort_beside, 1, "torch") == [0]
    with pytest.raises(WorldError, match="returned its result, then ended with signal SIGABRT"):
        run_world(abort_beside, 1, "core")
    assert run_world(abort_beside, 1, "core") == [0]
    monkeypatch.setenv("WORLD_EXITS", "checked")
    with pytest.raises(WorldError, match="SIGABRT"):
        run_world(abort_beside, 1, "core")
    assert run_world(abort_beside, 1, "torch") == run_world(abort_beside, 1, "core", check_exit=False) == [0]
    with pytest.raises(WorldError, match="SIGABRT"):
        run_world(abort_beside, 1, "torch", check_exit=True)


def test_what_is_left_in_the_process_is_an_error_where_exits_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_files_checked", set())
    with pytest.raises(WorldError, match="ended with exit code 1") as caught:
        run_world(leave_things, 2)
    said = ("thread one that stays", "torch.float32 became torch.float64", "left_hook")
    assert all(text in one.output for one in caught.value.outcomes for text in said)
    assert run_world(leave_things, 2) == [0, 1]


def test_a_failing_rank_is_named_with_its_traceback_and_the_others_are_not_waited_for() -> None:
    with pytest.raises(WorldError, match="rank 1: raised(.|\n)*ValueError: rank 1 says no") as caught:
        run_world(raise_on, 2, 1)
    assert caught.value.outcomes[0].seconds < launcher.HANG_SECONDS


def test_a_hanging_rank_is_killed_and_its_stack_is_shown() -> None:
    with pytest.raises(WorldError, match="rank 1: still running; its stack(.|\n)*an_unmistakable_place") as caught:
        run_world(hang_on, 2, 1, timeout=3.0)
    assert [outcome.returned for outcome in caught.value.outcomes] == [True, False]


@pytest.mark.parametrize(("function", "second"), [(abort_at_exit, -signal.SIGABRT), (abort_in_a_destructor, 0)])
def test_every_rank_shuts_its_interpreter_down_and_the_first_also_runs_cpp_destructors(
    function: Callable[[int], object], second: int
) -> None:
    assert [one.exit_code for one in run_world_outcomes(function, 2, check_exit=True)] == [-signal.SIGABRT, second]


@pytest.mark.parametrize(
    "number",
    thorough((signal.SIGINT, signal.SIGKILL), unless=lambda one: one == signal.SIGINT),
    ids=["Ctrl-C", "kill -9"],
)
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path, number: signal.Signals) -> None:
    """Its first ranks start while it holds Ctrl-C back: none of those that follow inherits that."""
    code = (
        "from multiprocessing.resource_tracker import ensure_running\n"
        "from commhooks.experiments.launch import _interrupts_held_back\nfrom tests.world import run_world\n"
        "from tests.world.launcher import ensure_server\nfrom tests.world.test_world import sleeping_world\n"
        "ensure_running()  # its start would let Ctrl-C through again\n"
        "with _interrupts_held_back():\n    ensure_server()\n"
        f"run_world(sleeping_world, 2, {str(tmp_path / 'pid')!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL)
    files = [tmp_path / "pid.0", tmp_path / "pid.1"]
    assert until(lambda: all(file.exists() and file.read_text() for file in files), seconds=150.0)
    told = [file.read_text().split() for file in files]
    assert [held_back for _, held_back in told] == ["0", "0"]
    children = [int(pid) for pid, _ in told]
    everyone = children + [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
    os.killpg(parent.pid, number)
    parent.wait(60)
    assert until(lambda: all(map(has_ended, everyone)))
