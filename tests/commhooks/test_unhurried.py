"""Gloo's threads do not interrupt others when they wake up; all other threads of a process stay as they were."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import commhooks
from commhooks.communicators.unhurried import unhurried
from tests.commhooks.models import Given, wrap
from tests.commhooks.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER,
    reason="this system has no policy SCHED_BATCH, or the tests were started under another policy than the usual one",
)


def in_a_thread(function: Callable[[], int]) -> int:
    """Call it in a new thread, whose policy is its own."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def policy() -> int:
    return os.sched_getscheduler(0)


def test_a_thread_that_is_started_within_is_unhurried_and_its_creator_only_meanwhile() -> None:
    with unhurried():
        assert in_a_thread(policy) == os.SCHED_BATCH
    assert in_a_thread(policy) == policy() == os.SCHED_OTHER


def test_the_policy_returns_after_an_error() -> None:
    with pytest.raises(LookupError), unhurried():
        raise LookupError("no such luck")
    assert policy() == os.SCHED_OTHER


def test_a_policy_that_the_user_chose_stays() -> None:
    def under_idle() -> int:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with unhurried():
            within = in_a_thread(policy)
        assert policy() == os.SCHED_IDLE
        return within

    assert in_a_thread(under_idle) == os.SCHED_IDLE


def test_where_it_is_forbidden_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    with unhurried():
        assert in_a_thread(policy) == os.SCHED_OTHER


def test_where_there_is_no_such_policy_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "SCHED_BATCH")
    with unhurried():
        assert in_a_thread(policy) == os.SCHED_OTHER


def threads_of_attaching(rank: int, kind: str) -> tuple[list[int], list[int]]:
    """Return the policies of Gloo's threads that attaching started, and those of all threads of Python."""
    model = wrap(kind, Given((4, 4)))
    before = threads()  # whatever their names: a thread may not have taken its own yet
    attachment = commhooks.attach(model, "all-reduce")
    assert attachment.is_attached
    own = [thread.native_id for thread in threading.enumerate() if thread.native_id is not None]
    return [*map(os.sched_getscheduler, threads("gloo") - before)], [*map(os.sched_getscheduler, own)]


def threads(named: str = "") -> set[int]:
    every = Path("/proc/self/task").iterdir()
    return {int(thread.name) for thread in every if named in (thread / "comm").read_text()}


@pytest.mark.parametrize("kind", ["core", "torch"])
def test_the_threads_of_a_private_group_are_unhurried(kind: str) -> None:
    for of_gloo, of_python in run_ranks(threads_of_attaching, 2, kind):
        assert len(of_gloo) >= 2  # those that run collectives, and the event loop
        assert set(of_gloo) == {os.SCHED_BATCH}
        assert set(of_python) == {os.SCHED_OTHER}
