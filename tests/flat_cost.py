"""What a step's collectives carry, from one rank's requests: all ask for the same shapes, of tensors without memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from commhooks import make_compressor
from commhooks.communicators.collective import Traffic
from commhooks.compressors import COMPRESSORS, TwoHop
from commhooks.language import BucketView, Compressor, Context, Judge, Request, Slot
from commhooks.scheduling.packing import Packer
from commhooks.state.table import StateTable
from experiments.studies.bench.given import resnet18_shapes
from tests.cases import NEEDED

Shapes = Mapping[str, tuple[int, ...]]
WORLD_SIZES = (2, 4, 8, 16, 32, 64)
RESNET18: Shapes = {f"layer{number}": shape for number, shape in enumerate(resnet18_shapes())}
THOUSAND: Shapes = {f"layer{number}": (1000,) for number in range(1000)}
DEVICES = {"ResNet-18": "meta", "1,000 parameters of 1,000 elements": "cpu"}
"""Where they are counted: many small operations take longer on "meta"."""
MODELS: Mapping[str, Shapes] = dict(zip(DEVICES, (RESNET18, THOUSAND), strict=True))


def traffic_of(
    compressor: Compressor, shapes: Shapes, world_size: int, *, step: int = 0, device: str = "meta"
) -> Traffic:
    """Return what rank 0 of so many sends in a step whose gradients, of these shapes, share a bucket.

    On "cpu" with zeros for gradients, which is quicker if they are small and many.
    """
    bucket = _bucket(compressor, shapes, world_size, device)
    traffic, packer = Traffic(), Packer(world_size, by_name=True)
    exchange = compressor.compress(bucket, Context(0, world_size, step))
    asked = next(exchange, None)
    for _ in range(100):
        if asked is None or isinstance(asked, Judge):
            return traffic
        requests = asked if isinstance(asked, tuple) else (asked,)
        answers = _answers(packer, requests, traffic, world_size)
        asked = exchange.send(answers if isinstance(asked, tuple) else answers[0])
    raise AssertionError(f"{compressor} asks for ever more")


def _bucket(compressor: Compressor, shapes: Shapes, world_size: int, device: str) -> BucketView:
    parameters = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    table = StateTable(0, world_size)
    table.bind(parameters.items())
    memory = torch.zeros(sum(p.numel() for p in parameters.values()), device=device)
    pieces = memory.split([p.numel() for p in parameters.values()])
    slots = [Slot(p, piece, table.of(p)) for p, piece in zip(parameters.values(), pieces, strict=True)]
    bucket = BucketView(0, memory, slots)
    table.lay_out(bucket, compressor)
    return bucket


def _answers(packer: Packer, requests: Sequence[Request], traffic: Traffic, world_size: int) -> list[list[Tensor]]:
    """Lay requests out as the scheduler does, count the collectives, and return answers of the right shapes."""
    answers: list[list[Tensor]] = [[torch.empty(0)] * len(request.parts) for request in requests]
    for packed in packer.pack(requests):
        traffic.count(packed.collective, world_size)
        result = packed.collective.room_for_answer(world_size)
        for place, answer in zip(packed.places, packed.answers(result), strict=True):
            answers[place.request][place.number] = answer
    return answers


def two_hop_names() -> list[str]:
    """Return the names of all compressors that exchange and gather codes."""
    return [name for name in sorted(COMPRESSORS) if isinstance(two_hop_of(name), TwoHop)]


def two_hop_of(name: str) -> Compressor:
    """Return the compressor of a name, without the wrapper that keeps its residual."""
    compressor = make_compressor(name, **NEEDED.get(name, {}))
    return getattr(compressor, "inner", compressor)
