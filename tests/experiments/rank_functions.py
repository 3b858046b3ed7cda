"""What ranks do in tests of the launcher; a new process imports them by name."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import psutil
import torch
import torch.distributed as dist

import commhooks
from commhooks.experiments import launch
from commhooks.experiments.cluster import INTERFACE, interface_bytes
from commhooks.experiments.launch import Send
from ddp_core import DistributedDataParallel
from tests.experiments.forked_ranks import forking

MEGABYTE = 1_000_000
SUMS = 3


@dataclass(frozen=True)
class Told:
    """What a rank tells of itself."""

    rank: int
    total: int  # of all ranks' numbers
    threads: str
    pid: int
    ctrl_c_is_held_back: bool
    addresses: list[str]  # at which it waits for connections


def work_together(rank: int, ranks: int, argument: int, send: Send) -> None:
    """Add up all ranks' numbers, and exchange gradients, as a run does."""
    total = torch.tensor(rank + argument)
    dist.all_reduce(total)
    model = DistributedDataParallel(torch.nn.Linear(argument, argument))
    commhooks.attach(model, "int8")
    model(torch.ones(1, argument)).sum().backward()
    held_back = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    send(Told(rank, int(total), os.environ["OMP_NUM_THREADS"], os.getpid(), held_back, listening()))


def start_others(told: Connection) -> None:
    """Start two ranks that sleep on, and tell which processes they are."""
    with mock.patch.object(launch, "multiprocessing", forking()):
        launch.run_world(sleep_on, 2, None, told.send, timeout=600)


def sleep_on(rank: int, ranks: int, argument: None, send: Send) -> None:
    send(os.getpid())
    time.sleep(600)


def listening() -> list[str]:
    """Return the addresses at which this process waits for connections."""
    sockets = psutil.Process().net_connections("inet")
    return [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN]


def fail_on_one(rank: int, ranks: int, argument: int, send: Send) -> None:
    """One rank raises; the others wait for it in a collective."""
    send(os.getpid())
    if rank == argument:
        raise LookupError("the needle is not in the haystack")
    dist.barrier()


def die_on_one(rank: int, ranks: int, argument: int, send: Send) -> None:
    """One rank is killed; the others sleep on."""
    send(os.getpid())
    if rank == argument:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def say_nothing(rank: int, ranks: int, argument: int, send: Send) -> None:
    """No rank ever reports."""
    time.sleep(600)


def say_where_it_is(rank: int, ranks: int, argument: None, send: Send) -> None:
    """Every rank sends its place on its host, the number of ranks there, and what identifies the host's network."""
    namespace = Path("/proc/self/ns/net").stat().st_ino
    send((rank, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], namespace))


def sum_a_megabyte(rank: int, ranks: int, argument: None, send: Send) -> None:
    """Every rank sends the shortest time of a sum, the bytes that its interface sent for each, and where it is."""
    message = torch.ones(MEGABYTE // 4)
    dist.all_reduce(message)  # makes the connections
    dist.barrier()
    sent, seconds = interface_bytes(INTERFACE)[0], []
    for _ in range(SUMS):
        begin = time.monotonic()
        dist.all_reduce(message)
        seconds.append(time.monotonic() - begin)
        dist.barrier()
    per_sum = (interface_bytes(INTERFACE)[0] - sent) / SUMS
    send((min(seconds), per_sum, os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"]))
