"""What ranks on the hosts of a cluster run: exchanges of one message, counted by us and by the interface."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

import commhooks
from commhooks.experiments.cluster import INTERFACE, interface_bytes
from commhooks.experiments.launch import Send


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A compressor, and the tensor that it averages."""

    compressor: commhooks.Compressor
    shape: tuple[int, ...]
    steps: int


@dataclasses.dataclass(frozen=True)
class Counted:
    """The bytes that one rank sent for an exchange, a step."""

    exchange: int  # its place in the list
    moved: float  # as our statistics say: the mean over ranks
    sent: float  # as the interface says


def count(rank: int, ranks: int, argument: tuple[Exchange, ...], send: Send) -> None:
    """Run every exchange, and send what was counted."""
    torch.set_num_threads(1)
    for number, exchange in enumerate(argument):
        gradient = torch.randn(exchange.shape, generator=torch.Generator().manual_seed(rank))
        exchanger = commhooks.Exchanger({"layer": gradient}, exchange.compressor)
        exchanger.average({"layer": gradient.clone()})  # connections are made, and state is laid out
        before = exchanger.statistics()
        dist.barrier()
        sent, _ = interface_bytes(INTERFACE)
        for _ in range(exchange.steps):
            exchanger.average({"layer": gradient.clone()})
        dist.barrier()
        moved = exchanger.statistics().moved_bytes - before.moved_bytes
        sent = interface_bytes(INTERFACE)[0] - sent
        send(Counted(number, moved / exchange.steps, sent / exchange.steps))
        exchanger.close()
