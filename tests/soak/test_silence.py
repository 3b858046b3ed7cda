"""Nobody waits beyond a limit for a store that stops answering, or a cable that is pulled: all others raise and end."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

import commhooks
from commhooks.experiments.cluster import INTERFACE, Cluster, why_not
from tests.commhooks.models import Given, Shape, gradients_of, wrap
from tests.commhooks.workers import normal, zeros
from tests.world import Outcome, run_world, run_world_outcomes

HOOK_TIMEOUT = 1.5
GRACE_SECONDS = 5.0
"""How much later than its limit a rank may raise."""
both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])
both_policies = pytest.mark.parametrize("policy", ["fifo", "fused"])
SHAPES: list[Shape] = [(40, 40)] * 6
STEP = 10
"""The step that begins with a fault."""
STEPS = 40
PORT = 29500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """What befalls a rank as a step begins: its process is stopped or killed, or its cable is pulled."""

    rank: int
    how: str
    seconds: float | None = None
    """How long; None: for ever."""

    def strike(self, cluster: Cluster | None) -> None:
        """Begin it; a process that is stopped returns when it runs again."""
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stop":
            again = f"kill -CONT {os.getpid()}"
            if self.seconds is not None:
                subprocess.Popen(["sh", "-c", f"sleep {self.seconds}; {again}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        assert cluster is not None, "only a host has a cable"
        cluster.unplug(self.rank)
        if self.seconds is not None:
            threading.Timer(self.seconds, cluster.plug_in, [self.rank]).start()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """What became of one rank's training."""

    error: str = ""
    seconds: float = 0.0
    steps: int = 0
    gradients: list[Tensor] = dataclasses.field(default_factory=list)


def train_on_a_host(
    rank: int, cluster: Cluster, kind: str, policy: str, fault: Fault, hook_timeout: float | None, group_timeout: float
) -> Told:
    """Join a group from a host of this rank's own, and train; rank 0's process holds the store."""
    cluster.enter(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    store = TCPStore(cluster.address(0), PORT, cluster.hosts, is_master=rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=cluster.hosts, timeout=timedelta(seconds=group_timeout)
    )
    return train(rank, kind, policy, fault, hook_timeout, cluster)


def train_and_end_what_is_stopped(rank: int, kind: str, policy: str, fault: Fault, hook_timeout: float) -> Told:
    """Train until the other one of two ranks falls silent, then kill it, so that the world need not wait for it."""
    processes: list[int] = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    told = train(rank, kind, policy, fault, hook_timeout)
    with contextlib.suppress(ProcessLookupError):
        os.kill(processes[fault.rank], signal.SIGKILL)
    return told


def train(
    rank: int, kind: str, policy: Any, fault: Fault, hook_timeout: float | None = None, cluster: Cluster | None = None
) -> Told:
    """Train to the end, or until something fails; DiLoCo trains alone, averages every four steps, and must not fail.

    Of DiLoCo the outer copies are returned, in place of gradients.
    """
    diloco, model = None, Given(*SHAPES) if kind == "diloco" else wrap(kind, Given(*SHAPES), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if kind == "diloco":
        schedule: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 1}
        diloco = commhooks.DiLoCo(model, optimizer, compressor="int4", hook_timeout=hook_timeout, **schedule)
    else:
        commhooks.attach(model, "powersgd:rank=2", policy=policy, hook_timeout=hook_timeout)
    for step in range(STEPS):
        if step >= STEP:
            time.sleep(0.1)  # a fault that passes must not find the training over
        begun = time.monotonic()
        if (rank, step) == (fault.rank, STEP):
            fault.strike(cluster)
        model.zero_grad()
        try:
            model(*normal(zeros(*SHAPES), dist.get_world_size(), seed=step)[rank]).backward()
        except Exception as error:
            return Told(error=str(error), seconds=time.monotonic() - begun, steps=step)
        if diloco is not None:
            optimizer.step()
            diloco.step()
    if diloco is None:
        return Told(steps=STEPS, gradients=gradients_of(model))
    with diloco.outer_parameters():
        outer = [parameter.detach().clone() for parameter in model.parameters()]
    diloco.close()
    return Told(steps=STEPS, gradients=outer)


def check_survivor(outcome: Outcome, limit: float, named: str) -> None:
    """Assert that a rank raised in time, named who is silent, and ended."""
    told: Told = outcome.value
    assert outcome.returned and outcome.stack is None, outcome.describe()
    assert told.error, "the training came to its end"
    assert told.seconds < limit + GRACE_SECONDS, (told.seconds, told.error)
    assert named in told.error.replace("The store", "the store"), told.error


def silence_the_host_of_the_store(case: tuple[str, str, str]) -> Outcome:
    """Return what became of rank 1 when rank 0, whose process holds the store, fell silent."""
    how, kind, policy = case
    silent, survivor = run_world_outcomes(
        train_and_end_what_is_stopped, 2, kind, policy, Fault(rank=0, how=how), HOOK_TIMEOUT, store="tcp"
    )
    assert not silent.returned
    check_survivor(survivor, HOOK_TIMEOUT, "the store at 127.0.0.1:")
    return survivor


def test_ranks_raise_in_time_when_the_host_of_the_store_stops_answering_or_dies() -> None:
    cases = [("stop", "core", "fifo"), ("stop", "torch", "fused"), ("kill", "core", "fused")]
    with ThreadPoolExecutor() as side_by_side:
        *stopped, killed = [one.value.error for one in side_by_side.map(silence_the_host_of_the_store, cases)]
    for error in stopped:
        assert f"hook_timeout={HOOK_TIMEOUT} s." in error
    assert killed.count("rank 1") == 1 and "stopped, because" not in killed, killed


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Cluster.create(3) as made:
        yield made


def plug_everything_in(cluster: Cluster) -> None:
    for host in range(cluster.hosts):
        cluster.plug_in(host)


FAULTS = [("stop", 0), ("pull", 0), ("pull", 2)]


@pytest.mark.soak
@both_ddps
@both_policies
@pytest.mark.parametrize("limited_by", ["hook_timeout", "group"])
@pytest.mark.parametrize(("how", "rank"), FAULTS)
def test_every_running_rank_raises_in_time_and_ends(
    cluster: Cluster, how: str, rank: int, limited_by: str, policy: str, kind: str
) -> None:
    plug_everything_in(cluster)
    hook_timeout, group_timeout = (5.0, 1800.0) if limited_by == "hook_timeout" else (None, 15.0)
    limit = hook_timeout or group_timeout
    given = (cluster, kind, policy, Fault(rank=rank, how=how), hook_timeout, group_timeout)
    outcomes = run_world_outcomes(train_on_a_host, 3, *given, backend=None, timeout=limit + 25)
    store = f"the store at {cluster.address(0)}:{PORT}"
    for outcome in outcomes:
        if how == "stop" and outcome.rank == rank:
            continue
        if rank == 0:
            named = "No answer from rank 1, 2." if outcome.rank == 0 else store
        else:
            named = store if outcome.rank == rank else "No answer from rank 2."
        check_survivor(outcome, limit, named)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "policy"), [*itertools.product(["core", "torch"], ["fifo", "fused"]), ("diloco", "fused")]
)
@pytest.mark.parametrize(("how", "rank"), FAULTS)
def test_training_goes_on_after_two_seconds_of_silence(
    cluster: Cluster, how: str, rank: int, policy: str, kind: str
) -> None:
    plug_everything_in(cluster)
    given = (cluster, kind, policy, Fault(rank=rank, how=how, seconds=2.0), 5.0, 60.0)
    exits = kind != "torch"
    told: list[Told] = run_world(train_on_a_host, 3, *given, backend=None, timeout=60.0, check_exit=exits)
    assert [one.steps for one in told] == [STEPS] * 3, [one.error for one in told]
    for one in told[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one.gradients, told[0].gradients, strict=True))
