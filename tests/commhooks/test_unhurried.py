"""Gloo's event loop does not interrupt others when it wakes up; all other threads of a process stay as they were."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import commhooks
from commhooks.communicators.unhurried import unhurried
from tests.commhooks.models import Given, gradients_of, wrap
from tests.world import on_ranks

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


@on_ranks(2)
@pytest.mark.parametrize("kind", ["core", "torch"])
def test_the_event_loops_of_a_private_group_are_unhurried_and_no_other_thread(rank: int, kind: str) -> None:
    """Of all threads that attaching and a step start."""
    model = wrap(kind, Given((4, 4), (3,)))
    before = threads()
    attachment = commhooks.attach(model, commhooks.Hierarchical(inner=commhooks.make_compressor("fp16"), size=2))
    model(torch.ones(4, 4), torch.ones(3)).backward()  # opens the groups for some of the ranks
    found: dict[str, list[int]] = {}
    for thread in threads() - before:
        found.setdefault(_name_of(thread), []).append(os.sched_getscheduler(thread))
    own = [thread.native_id for thread in threading.enumerate() if thread.native_id is not None]
    assert attachment.is_attached
    assert found.pop("gloo_tcp_loop") == [os.SCHED_BATCH]  # one, for the groups of some of the ranks too
    assert len(found["pt_gloo_runloop"]) >= 4
    assert {policy for policies in found.values() for policy in policies} == {os.SCHED_OTHER}
    assert set(map(os.sched_getscheduler, own)) == {os.SCHED_OTHER}


def threads() -> set[int]:
    return {int(thread.name) for thread in Path("/proc/self/task").iterdir()}


@on_ranks(2)
def test_a_group_uses_the_interfaces_that_the_environment_names(rank: int) -> None:
    """There is an event loop for each device: the default group's, and two."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo,lo"
    model = wrap("core", Given((4, 4)))
    attachment = commhooks.attach(model, "all-reduce")
    model(torch.full((4, 4), float(rank))).backward()
    (mean,) = gradients_of(model)
    assert torch.equal(mean, torch.full((4, 4), 0.5))
    assert attachment.is_attached
    assert list(map(_name_of, threads())).count("gloo_tcp_loop") >= 3


def _name_of(thread: int) -> str:
    return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
