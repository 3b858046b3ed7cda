"""The launcher: ranks come, work, and are gone, whatever happens to them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import connection

import psutil
import pytest

from commhooks.experiments import launch
from commhooks.experiments.launch import RankFunction, WorldError, reason_of, run_world
from tests.experiments.forked_ranks import ForkingContext, forking
from tests.experiments.rank_functions import (
    Told,
    die_on_one,
    fail_on_one,
    listening,
    say_nothing,
    start_others,
    work_together,
)
from tests.waiting import has_ended, until
from tests.world.launcher import ensure_server


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forked() -> None:
    """Spawn them, as users' ranks are: the fixture of this name for all other files does not apply here."""


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork them: how they start is not what a test is about."""
    monkeypatch.setattr(launch, "multiprocessing", forking())


def test_ranks_work_together_on_one_thread_each_over_the_loopback_alone_and_are_gone() -> None:
    told: list[Told] = []
    addresses: list[str] = []
    environment = dict(os.environ)

    def collect(message: object) -> None:
        assert isinstance(message, Told)
        told.append(message)
        addresses.extend([*message.addresses, *listening()])  # the store's too

    run_world(work_together, 2, 10, collect, timeout=120)
    assert sorted((one.rank, one.total, one.threads) for one in told) == [(0, 21, "1"), (1, 21, "1")]
    assert all(has_ended(one.pid) for one in told)
    assert all(one.ctrl_c_is_held_back for one in told)  # from the start of their interpreters on
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert dict(os.environ) == environment
    assert len(addresses) >= 4 and set(addresses) == {"127.0.0.1"}


def test_ranks_end_when_the_process_that_started_them_is_killed() -> None:
    heard, told = multiprocessing.Pipe(duplex=False)
    parent = ForkingContext().Process(target=start_others, args=(told,))
    parent.start()
    assert connection.wait([heard], timeout=60)
    pids = [heard.recv(), heard.recv()]
    assert not any(map(has_ended, pids))
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    assert until(lambda: all(map(has_ended, pids)))
    parent.join()


SILENT = "ranks 0, 1 reported nothing for 120 s; they were ended"
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n'
EFFECT = f"rank 0 failed:\n{TRACEBACK}RuntimeError: connection reset\n"
CHAIN = f"{TRACEBACK}KeyError: 1\n\nDuring handling of the above, another occurred:\n\n{TRACEBACK}ValueError: cause\n"


@pytest.mark.parametrize(
    ("story", "reason"),
    [
        ("", "no reason given"),
        (SILENT, SILENT),
        (f"rank 1 died: exit code 7\n{EFFECT}", "rank 1 died: exit code 7"),
        (f"rank 1 failed:\n{CHAIN}in communication hook 'noted'\n\n{EFFECT}", "ValueError: cause"),
    ],
    ids=["none", "silent", "died", "raised"],
)
def test_the_reason_of_a_failure_is_the_first_ranks_exception(story: str, reason: str) -> None:
    assert reason_of(story) == reason


@pytest.mark.parametrize(
    ("function", "timeout", "words"),
    [
        (fail_on_one, 120, r"rank 1 failed:(?s:.*)in fail_on_one(?s:.*)LookupError: the needle is not in the haystack"),
        (die_on_one, 120, "rank 1 died: signal SIGKILL"),
        (say_nothing, 1, "ranks 0, 1 reported nothing for 1 s"),
    ],
    ids=["raises", "killed", "silent"],
)
def test_a_rank_that_fails_or_falls_silent_ends_the_others_and_says_why(
    forked: None, function: RankFunction, timeout: float, words: str
) -> None:
    ensure_server()
    before = {*psutil.Process().children(recursive=True)}
    pids: list[object] = []
    with pytest.raises(WorldError, match=words):
        run_world(function, 2, 1, pids.append, timeout=timeout)
    assert all(has_ended(pid) for pid in pids if isinstance(pid, int))
    assert {*psutil.Process().children(recursive=True)} <= before
