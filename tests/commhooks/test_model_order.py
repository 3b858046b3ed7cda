"""The step-time model follows the scheduler: the real policies, on a clock that is only counted, take as long."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commhooks.communicators import Collective, Pending
from commhooks.experiments.timing.link import Link
from commhooks.experiments.timing.step_time import Bucket, Stage, Step, step_time
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Exchange
from commhooks.language.requests import AllReduce, Part
from commhooks.scheduling.policy import POLICIES
from commhooks.scheduling.task import BucketTask
from tests.tiers import A_ROW

RANKS = 4
SECONDS = st.floats(0, 0.2)


@dataclass
class Clock:
    """The worker thread's time, and when the link is free."""

    now: float = 0.0
    link_free: float = 0.0


@dataclass
class Underway:
    """A collective on a link, which ends at a moment."""

    result: Tensor
    ends: float

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return: nobody waits for a clock that is only counted."""


class CountedLink:
    """A communicator that moves nothing, and says when it would have."""

    rank, world_size = 0, RANKS

    def __init__(self, clock: Clock, link: Link) -> None:
        self.clock, self.link = clock, link

    def start(self, collective: Collective) -> Pending:
        clock = self.clock
        seconds = self.link.transfer(collective.kind, collective.payload_bytes, RANKS).seconds
        clock.link_free = max(clock.now, clock.link_free) + seconds
        return Underway(collective.tensor, clock.link_free)


def exchange(bucket: Bucket, clock: Clock) -> Exchange:
    """Compress for as long as the bucket's stages say, and send what they say."""
    for number, stage in enumerate(bucket.stages, start=1):
        clock.now += stage.seconds
        ((_, payload),) = stage.collectives
        yield AllReduce(Part(torch.zeros(payload // 4)), last=number == len(bucket.stages))
    clock.now += bucket.after


def seconds_of_the_policy(step: Step, link: Link) -> float:
    """Return when the scheduler's own policy has ended the step, on a rank whose worker thread has its own core."""
    clock = Clock()
    left = deque(step.buckets)

    def wait(pending: Pending) -> bool:
        assert isinstance(pending, Underway)
        if pending.ends <= clock.now:
            return True
        clock.now = max(clock.now, min(pending.ends, left[0].ready if left else math.inf))
        return False

    done: list[BucketTask] = []
    (make_policy,) = (each for name, each in POLICIES.items() if name == step.policy)
    policy = make_policy(CountedLink(clock, link), wait, done.append)
    while len(done) < len(step.buckets):
        while left and left[0].ready <= clock.now:
            bucket = left.popleft()
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            view = BucketView(len(step.buckets) - len(left) - 1, torch.zeros(8))
            policy.add(BucketTask(exchange(bucket, clock), view, [future], 0, not left, lambda: "made up", RANKS))
        if not policy.turn():
            clock.now = max(clock.now, left[0].ready)
    return max(clock.now, step.compute)


STAGES = st.builds(Stage, SECONDS, st.integers(1, 5000).map(lambda elements: (("all-reduce", 4 * elements),)))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    ready = sorted(draw(st.lists(st.floats(0, 1), min_size=1, max_size=5)))
    stages = st.lists(STAGES, min_size=1, max_size=3).map(tuple)
    buckets = tuple(Bucket(moment, draw(stages), draw(SECONDS)) for moment in ready)
    return Step(compute=1.0, buckets=buckets, policy=draw(st.sampled_from(sorted(POLICIES))), cores=2)


@A_ROW
@given(steps(), st.builds(Link, rate=st.floats(1e4, 1e7), latency=st.floats(0, 0.01), algorithm=st.just("ring")))
def test_the_model_takes_as_long_as_the_policies_of_the_scheduler(step: Step, link: Link) -> None:
    assert step_time(step, link, RANKS).seconds == pytest.approx(seconds_of_the_policy(step, link), rel=1e-6)
