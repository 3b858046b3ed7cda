"""The harness itself: results, failures, deaths, hangs, and what is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
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


def sum_of_ranks(rank: int, offset: int, *, scale: int = 1) -> tuple[float, int, bool]:
    value = torch.tensor([float(rank + offset) * scale])
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads(), "torch._dynamo" in sys.modules


def raise_on(rank: int, which: int) -> int:
    if rank == which:
        raise ValueError(f"rank {rank} says no")
    dist.barrier()
    return rank


def die_on(rank: int, which: int) -> int:
    dist.barrier()  # the others may still be making the process group, and would fail there
    if rank == which:
        os.kill(os.getpid(), signal.SIGKILL)
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


def leave_a_child(rank: int) -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def sleeping_world(rank: int, file: str) -> None:
    held_back = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    Path(f"{file}.{rank}").write_text(f"{os.getpid()} {len(held_back)}")
    time.sleep(600)


def own_rank(rank: int) -> int:
    return rank


def own_processor_seconds(rank: int) -> float:
    return time.process_time()


@on_ranks(2)
def its_own_rank(rank: int) -> int:
    return rank


@on_ranks(2)
def wrong_on_the_second(rank: int, text: str) -> None:
    dist.barrier()  # the other may still be making the process group, and would fail there
    assert f"rank {rank}" in text


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_results_come_back_in_rank_order(store: str) -> None:
    assert run_world(sum_of_ranks, 3, 1, scale=2, store=store) == [(12.0, 1, True)] * 3


@on_ranks(3, environment={"WORLD_TEST": "yes"})
@pytest.mark.parametrize(("offset", "scale"), [(1, 2), (0, 1)])
def test_a_decorated_function_runs_on_every_rank_with_the_arguments_of_the_test(
    rank: int, tmp_path: Path, offset: int, scale: int
) -> float:
    assert dist.get_rank() == rank and dist.get_world_size() == 3 and os.environ.get("WORLD_TEST") == "yes"
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    total, *_ = sum_of_ranks(rank, offset, scale=scale)
    return total


@on_ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_may_be_the_number_of_ranks(rank: int, ranks: int) -> None:
    assert dist.get_world_size() == ranks


def test_a_decorated_function_fails_where_an_assertion_does_and_shows_its_values() -> None:
    with pytest.raises(WorldError, match="wrong_on_the_second on 2 ranks failed\n(.|\n)*rank 1: raised") as caught:
        wrong_on_the_second(text="rank 0")
    assert caught.value.outcomes[0].ok
    assert "    rank = 1\n    text = 'rank 0'" in str(caught.value)


def test_what_a_decorated_function_returns_must_be_equal_on_all_ranks() -> None:
    with pytest.raises(AssertionError):
        its_own_rank()


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


def test_ranks_need_no_import_of_torch() -> None:
    assert max(run_world(own_processor_seconds, 4, backend=None)) < 1.0  # the import alone is 1.8


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


def test_outcomes_tell_of_every_rank_without_raising() -> None:
    first, second = run_world_outcomes(die_on, 2, 0, timeout=20.0)
    assert first.exit_code == -signal.SIGKILL and not first.ok
    assert "rank 0: died with signal SIGKILL" in first.describe()
    assert second.traceback is not None and "barrier" in second.traceback


def test_worlds_of_several_threads_read_each_others_exit_codes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    read_signed: Callable[[int], int] = forkserver.read_signed

    def read_slowly(descriptor: int) -> int:
        time.sleep(0.1)  # whoever else polls this process now sees that it has ended
        return read_signed(descriptor)

    monkeypatch.setattr(forkserver, "read_signed", read_slowly)
    with ThreadPoolExecutor(3) as pool:
        worlds = [pool.submit(run_world, own_rank, 2, backend=None) for _ in range(6)]
        assert [world.result() for world in worlds] == [[0, 1]] * 6


def test_a_process_that_a_rank_leaves_behind_is_killed() -> None:
    (pid,) = run_world(leave_a_child, 1, backend=None)
    assert until(lambda: has_ended(pid))


def test_no_temporary_folder_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_world(sum_of_ranks, 2, 0)
    with pytest.raises(WorldError):
        run_world(raise_on, 2, 0)
    assert list(tmp_path.iterdir()) == []


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
