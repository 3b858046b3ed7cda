"""What a step's collectives carry, from requests alone: `python -m tests.flat_cost` prints a table.

Tensors are on PyTorch's "meta" device, which has shapes and no memory, so 64 workers of ResNet-18 take no longer than
one. What a rank asks for has the same shapes on every rank, so one stands for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from commhooks import BucketView, Compressor, Context, Judge, Request, Slot
from commhooks.communicators.traffic import Traffic
from commhooks.scheduling.packing import Packer
from commhooks.state.table import StateTable

Shapes = Mapping[str, tuple[int, ...]]


def traffic_of(compressor: Compressor, shapes: Shapes, world_size: int, step: int = 0) -> Traffic:
    """Return what rank 0 of so many sends in a step whose gradients, of these shapes, share a bucket."""
    bucket = _bucket(compressor, shapes, world_size)
    traffic, packer = Traffic(), Packer(world_size, by_name=True)
    exchange = compressor.compress(bucket, Context(0, world_size, step))
    asked = next(exchange, None)
    for turn in range(100):
        if asked is None or isinstance(asked, Judge):
            return traffic
        requests = asked if isinstance(asked, tuple) else (asked,)
        answers = _answers(packer, requests, turn, traffic, world_size)
        asked = exchange.send(answers if isinstance(asked, tuple) else answers[0])
    raise AssertionError(f"{compressor} asks for ever more")


def _bucket(compressor: Compressor, shapes: Shapes, world_size: int) -> BucketView:
    parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    table = StateTable(0, world_size)
    table.bind(parameters.items())
    memory = torch.empty(sum(p.numel() for p in parameters.values()), device="meta")
    pieces = memory.split([p.numel() for p in parameters.values()])
    slots = [Slot(p, piece, table.of(p)) for p, piece in zip(parameters.values(), pieces, strict=True)]
    bucket = BucketView(0, memory, slots)
    table.lay_out(slots, compressor)
    table.lay_out_entries(slots[0], compressor.bucket_state(bucket))
    return bucket


def _answers(
    packer: Packer, requests: Sequence[Request], turn: int, traffic: Traffic, world_size: int
) -> list[list[Tensor]]:
    """Lay requests out as the scheduler does, count the collectives, and return answers of the right shapes."""
    answers: list[list[Tensor]] = [[torch.empty(0)] * len(request.parts) for request in requests]
    for shipment in packer.ship(requests, turn):
        traffic.count(shipment.collective, world_size)
        result = shipment.collective.room_for_answer(world_size)
        for place, answer in zip(shipment.places, shipment.answers(result), strict=True):
            answers[place.request][place.number] = answer
    return answers
