"""Run exchanges of a single worker, one at a time, without an engine around them."""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch import Tensor

from commhooks.language import BucketView, Compressor, Context, Exchange, Slot
from commhooks.scheduling.channels import ConnectionChannel
from commhooks.scheduling.lockstep import lockstep_connections, run_in_turns
from commhooks.scheduling.task import BucketTask
from commhooks.state.table import StateTable

ALONE = Context(0, 1, 0)


def run_alone(bucket: BucketView, exchange: Exchange) -> Tensor:
    """Run one bucket's exchange, a step of its own, to its end; return the mean."""
    (connection,) = lockstep_connections(1)
    bucket.scratch.turn += 1
    future: Any = mock.Mock()  # a real one wants a real device, and nobody waits for it
    task = BucketTask(exchange, bucket, [future], step=0, is_last=True, parameters=lambda: "its own", world_size=1)
    channel = ConnectionChannel()
    connection.open(channel, bucket.memory.device, "").submit(channel, task)
    run_in_turns([connection])
    return bucket.mean


def bucket_of(parameters: list[Tensor], memory: Tensor, table: StateTable, compressor: Compressor) -> BucketView:
    """Return a bucket of these parameters, called "weights.0" and so on, with its state laid out."""
    table.bind((f"weights.{number}", parameter) for number, parameter in enumerate(parameters))
    parts = memory.split([parameter.numel() for parameter in parameters])
    slots = [Slot(parameter, part, table.of(parameter)) for parameter, part in zip(parameters, parts, strict=True)]
    view = BucketView(0, memory, slots)
    table.lay_out(view, compressor)
    return view
