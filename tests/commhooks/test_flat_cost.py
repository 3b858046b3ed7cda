"""Bytes sent per rank with two hops hardly depend on the number of ranks; with gathering they do."""

from __future__ import annotations

import dataclasses
import math

import pytest

from commhooks import TwoHop, make_compressor
from commhooks.language.entries import blocks_served
from tests.commhooks.workers import Workers, normal, zeros
from tests.flat_cost import DEVICES, MODELS, RESNET18, WORLD_SIZES, Shapes, traffic_of, two_hop_names, two_hop_of

FLOOR = (2 - 2 / 64) / (2 - 2 / 2)
"""Two passes around a ring of W send 2·(W - 1)/W of a message: so many times more of it at 64 ranks than at 2."""
MOST = 2.1
QUICK = ("fp16-two-hop", "int8", "sign")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in two_hop_names()]


def moved(name: str, model: str, world_size: int) -> int:
    return traffic_of(make_compressor(name), MODELS[model], world_size, device=DEVICES[model]).moved_bytes


def padding(shapes: Shapes, block: int, world_size: int) -> float:
    """Return by how much the busiest rank's blocks are more than the average's: so much of every row is empty."""
    blocks = {name: math.prod(shape) // block for name, shape in shapes.items()}
    served = [sum(len(blocks_served(*one, rank, world_size)) for one in blocks.items()) for rank in range(world_size)]
    return max(served) * world_size / sum(blocks.values()) - 1 if any(served) else 0.0


@pytest.mark.parametrize("name", ["sign", "powersgd", "sparse-loco"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_counted_from_requests_is_what_is_carried(name: str, world_size: int) -> None:
    shapes = {"layer0": (24, 40), "layer1": (300,), "layer2": (64, 33)}
    workers = Workers(make_compressor(name), world_size, zeros(*shapes.values()), policy="fused")
    workers.step(normal(workers.parameters, world_size, seed=1))
    for device in ("meta", "cpu"):
        counted = traffic_of(make_compressor(name), shapes, world_size, device=device)
        assert dataclasses.replace(workers.traffic, seconds_waiting=0.0) == counted


def test_all_sizes_cost_nearly_the_same() -> None:
    costs = [moved("sign", "ResNet-18", size) for size in WORLD_SIZES]
    assert costs == sorted(costs)
    for size, cost in zip(WORLD_SIZES, costs, strict=True):
        assert cost / costs[0] == pytest.approx(2 - 2 / size, rel=MOST / FLOOR - 1)


@pytest.mark.parametrize("name", NAMES)
def test_64_ranks_cost_hardly_more_than_the_ring_itself_does(name: str) -> None:
    assert FLOOR * 0.99 < moved(name, "ResNet-18", 64) / moved(name, "ResNet-18", 2) < MOST


@pytest.mark.parametrize("name", two_hop_names())
def test_with_many_small_parameters_the_fullest_row_is_added(name: str) -> None:
    """Blocks are dealt by parameters' names: with 15 of each, or 7, no rank has many more than another."""
    (model,) = set(MODELS) - {"ResNet-18"}
    two_hop = two_hop_of(name)
    assert isinstance(two_hop, TwoHop)
    empty = padding(MODELS[model], two_hop.codec.block, 64)
    assert empty < 1.0  # blocks of 512: each of these parameters has one, and one rank of 64 serves twice the average
    assert FLOOR * 0.99 < moved(name, model, 64) / moved(name, model, 2) < MOST * (1 + empty)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", MODELS)
def test_only_what_is_no_whole_block_rides_uncompressed(name: str, model: str) -> None:
    two_hop = two_hop_of(name)
    assert isinstance(two_hop, TwoHop)
    summed = traffic_of(make_compressor(name), MODELS[model], 2, device=DEVICES[model]).by_kind.get("all-reduce")
    rest = sum(math.prod(shape) % two_hop.codec.block for shape in MODELS[model].values())
    assert (summed.payload_bytes if summed else 0) <= 4 * rest


def test_gathering_every_ranks_code_is_not_flat() -> None:
    """So that the bounds can fail: what gathers grows with the ranks, 63 times from 2 to 64."""
    small, large = (traffic_of(make_compressor("sparse-loco"), RESNET18, size).moved_bytes for size in (2, 64))
    assert large == 63 * small
