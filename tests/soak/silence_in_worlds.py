"""What ranks run whose network, or whose store, falls silent."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import threading
import time
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

import commhooks
from experiments.cluster import INTERFACE, Cluster
from tests.commhooks.models import Given, Shape, gradients_of, wrap
from tests.commhooks.workers import normal, zeros

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
    rank: int,
    cluster: Cluster,
    kind: str,
    policy: str,
    fault: Fault,
    hook_timeout: float | None,
    group_timeout: float,
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
    rank: int,
    kind: str,
    policy: str,
    fault: Fault,
    hook_timeout: float | None = None,
    cluster: Cluster | None = None,
) -> Told:
    """Train to the end, or until something fails."""
    model = wrap(kind, Given(*SHAPES), bucket_cap_mb=0.01)
    commhooks.attach(model, commhooks.make_compressor("powersgd", rank=2), policy=policy, hook_timeout=hook_timeout)
    world_size = dist.get_world_size()
    for step in range(STEPS):
        if step >= STEP:
            time.sleep(0.1)  # a fault that passes must not find the training over
        begun = time.monotonic()
        if (rank, step) == (fault.rank, STEP):
            fault.strike(cluster)
        try:
            model(*normal(zeros(*SHAPES), world_size, seed=step)[rank]).backward()
        except Exception as error:
            return Told(error=str(error), seconds=time.monotonic() - begun, steps=step)
        if step < STEPS - 1:
            model.zero_grad()
    return Told(steps=STEPS, gradients=gradients_of(model))
