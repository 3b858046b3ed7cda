"""The scheduler that runs on NCCL, on a device that is made up: deadlines, failures, and who is told of them.

tests/gpu has the same on a real one.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks import CollectiveError
from commhooks.communicators import LockstepGroup
from commhooks.communicators.failure_store import FailureStore
from commhooks.communicators.kernels import Kernels
from commhooks.compressors import AllReduceMean
from commhooks.errors import CompressorError
from commhooks.language import BucketView, Compressor, Context
from commhooks.language.compressor import Exchange
from commhooks.language.requests import AllReduce
from commhooks.scheduling.channels import ConnectionChannel
from commhooks.scheduling.inline import InlineScheduler
from commhooks.scheduling.task import BucketTask
from tests.commhooks.inline_on_cpu import HostStream
from tests.tiers import A_ROW
from tests.waiting import until

LIMIT = 0.3
POLICIES = ["fifo", "fused"]


@dataclasses.dataclass
class Told(FailureStore):
    """A failure store that notes what this rank posts, and whether its future had failed by then."""

    heard: str | None = None
    is_closed: bool = False
    posted: list[tuple[str, bool]] = dataclasses.field(default_factory=list)
    future: torch.futures.Future[Tensor] = dataclasses.field(default_factory=torch.futures.Future)

    def post(self, cause: str) -> None:
        self.posted.append((cause, self.future.done()))

    def failure(self) -> str | None:
        return self.heard

    def close(self) -> None:
        self.is_closed = True


class Harness:
    """One rank's inline scheduler, and a task for it to run."""

    def __init__(self, policy: Any, limit: float | None, *, keeps_up: bool = False) -> None:
        self.stream, self.failures = HostStream(keeps_up=keeps_up), Told()
        communicator = LockstepGroup(1).communicators()[0]
        self.scheduler = InlineScheduler(communicator, _agree, (self.stream, self.stream), limit, self.failures)
        self.channel = ConnectionChannel(policy=policy)
        self.scheduler.open(self.channel, "")

    def submit(self, compressor: Compressor | None = None) -> torch.futures.Future[Tensor]:
        """Hand in a bucket of its own, the only one of its step."""
        task = _task(compressor or AllReduceMean())
        task.futures = [self.failures.future]
        self.scheduler.submit(self.channel, task)
        return task.futures[0]


def _task(compressor: Compressor) -> BucketTask:
    view = BucketView(0, torch.ones(3))
    exchange = compressor.compress(view, Context(0, 1, 0))
    return BucketTask(exchange, view, [torch.futures.Future()], 0, True, lambda: "parameters a, b", 1)


def _agree(terms: str, kernels: Kernels) -> None:
    """Find that every rank has come with the same."""


def raised_by(future: torch.futures.Future[Tensor]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 "too broad": the caller looks at it
        future.wait()
    return caught.value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failing(Compressor):
    """Raise after the first answer, and note what was cleaned up."""

    cleaned: list[str] = dataclasses.field(default_factory=list, hash=False)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        try:
            yield AllReduce(*(tile.part() for tile in bucket.tiles))
            raise ValueError("no such factor")
        finally:
            self.cleaned.append("cleaned")


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_timeout_nobody_waits_for_the_device(policy: str) -> None:
    harness = Harness(policy, None)
    assert harness.submit().done()
    assert harness.stream.marks == []
    assert "commhooks watch" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("policy", POLICIES)
def test_with_one_the_future_is_completed_when_the_device_is_done(policy: str) -> None:
    harness = Harness(policy, LIMIT)
    future = harness.submit()
    asked, answered, written = (harness.stream.marks[number] for number in range(3))
    for mark in (asked, answered):
        mark.reached = True
        time.sleep(0.05)
        assert not future.done()
    written.reached = True
    assert until(future.done)
    assert torch.equal(future.wait(), torch.ones(3))
    assert harness.scheduler.error is None
    harness.scheduler.stop()


@A_ROW
@pytest.mark.parametrize("policy", POLICIES)
def test_a_collective_that_takes_too_long_is_an_error_that_the_other_ranks_hear_of(policy: str) -> None:
    harness = Harness(policy, LIMIT)
    future = harness.submit()
    begun = time.monotonic()
    harness.stream.reach(1)  # the device waits for the collective
    assert until(future.done)
    assert time.monotonic() - begun >= LIMIT
    error = raised_by(future)
    assert isinstance(error, CollectiveError)
    expected = f"a collective was not done after hook_timeout={LIMIT} s."
    assert str(error) == f"rank 0, step 0, bucket 0 (parameters a, b): CollectiveError: {expected}"
    assert until(lambda: bool(harness.failures.posted))
    assert harness.failures.posted == [(str(error), True)]  # the backward pass hears of it before the store does
    assert harness.scheduler.error is error
    harness.failures.future = torch.futures.Future()
    assert f"not started, because of an earlier failure: {error}" in str(raised_by(harness.submit()))
    harness.scheduler.stop()


@A_ROW
def test_the_time_that_a_gradient_takes_is_not_the_collectives() -> None:
    harness = Harness("fifo", LIMIT)
    future = harness.submit()
    time.sleep(2 * LIMIT)  # the device has not come to the collective
    assert not future.done()
    harness.stream.reach(3)
    assert until(future.done)
    assert torch.equal(future.wait(), torch.ones(3))
    harness.scheduler.stop()


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_a_compressor_that_fails_is_told_to_the_other_ranks(limit: float | None) -> None:
    harness = Harness("fifo", limit, keeps_up=True)
    failing = Failing()
    error = raised_by(harness.submit(failing))
    assert isinstance(error, CompressorError)
    assert "rank 0, step 0, bucket 0 (parameters a, b): ValueError: no such factor" in str(error)
    assert harness.failures.posted == [(str(error), True)]
    assert failing.cleaned == ["cleaned"]
    harness.scheduler.stop()


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_what_another_rank_tells_is_raised_at_the_next_bucket(limit: float | None) -> None:
    harness = Harness("fifo", limit, keeps_up=True)
    harness.failures.heard = "rank 1, step 0, bucket 0 (parameters a, b): ValueError: no such factor"
    error = raised_by(harness.submit())
    assert isinstance(error, CollectiveError)
    assert f"another rank failed: {harness.failures.heard}" in str(error)
    harness.scheduler.stop()


def test_and_at_once_where_the_watch_waits() -> None:
    harness = Harness("fifo", 60.0)
    future = harness.submit()
    harness.stream.reach(1)
    harness.failures.heard = "rank 1 failed"
    begun = time.monotonic()
    assert "another rank failed: rank 1 failed" in str(raised_by(future))
    assert time.monotonic() - begun < 60.0, "it waited for the limit"
    harness.scheduler.stop()


def test_stopping_fails_what_is_under_way_and_ends_the_thread() -> None:
    harness = Harness("fifo", 60.0)
    future = harness.submit()
    harness.scheduler.stop()
    assert "the attachment was stopped" in str(raised_by(future))
    assert "commhooks watch" not in [thread.name for thread in threading.enumerate()]
