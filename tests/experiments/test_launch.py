"""The launcher: ranks come, work, and are gone, whatever happens to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from experiments.launch import RankFunction, WorldError, reason_of, run_world
from tests.experiments.rank_functions import add_up, die_on_one, fail_on_one, listen, listening, say_nothing
from tests.waiting import has_ended


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forked() -> None:
    """Spawn them, as users' ranks are: the fixture of this name for all other files does not apply here."""


def test_ranks_work_together_on_one_thread_each_and_are_gone() -> None:
    messages: list[tuple[int, int, str, int, bool]] = []
    environment = dict(os.environ)
    collect: Callable[[object], None] = messages.append  # type: ignore[assignment]  # what this rank function sends
    run_world(add_up, 2, 10, collect, timeout=120)
    assert sorted(message[:3] for message in messages) == [(0, 21, "1"), (1, 21, "1")]
    assert all(has_ended(message[3]) for message in messages)
    assert all(message[4] for message in messages)  # from the start of their interpreters on
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert dict(os.environ) == environment


def test_ranks_of_this_machine_and_their_store_listen_on_the_loopback_alone() -> None:
    addresses: list[str] = []

    def collect(message: object) -> None:
        assert isinstance(message, list)
        addresses.extend([*message, *listening()])

    run_world(listen, 2, 32, collect, timeout=120)
    assert len(addresses) >= 4 and set(addresses) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (fail_on_one, ["rank 1 failed:", "in fail_on_one", "LookupError: the needle is not in the haystack"]),
        (die_on_one, ["rank 1 died: signal SIGKILL"]),
    ],
    ids=["raises", "killed"],
)
def test_a_rank_that_fails_ends_the_others_at_once_and_says_why(function: RankFunction, words: list[str]) -> None:
    pids: list[object] = []
    with pytest.raises(WorldError) as caught:
        run_world(function, 2, 1, pids.append, timeout=120)
    assert [word for word in words if word not in str(caught.value)] == []
    assert all(has_ended(pid) for pid in pids if isinstance(pid, int))


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


def test_ranks_that_fall_silent_are_ended() -> None:
    with pytest.raises(WorldError, match="ranks 0, 1 reported nothing for 6 s"):
        run_world(say_nothing, 2, None, print, timeout=6)
    assert not [child for child in psutil.Process().children() if "rank" in " ".join(child.cmdline())]
