"""Bytes sent per rank with two hops hardly depend on the number of ranks; with gathering they do."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest

from commhooks import make_compressor
from commhooks.communicators.collective import Traffic
from commhooks.compressors import TwoHop
from commhooks.language.entries import blocks_served
from tests.commhooks.workers import Workers, normal, zeros
from tests.flat_cost import DEVICES, MODELS, Shapes, traffic_of, two_hop_names, two_hop_of
from tests.tiers import A_ROW, rows, thorough

FLOOR = (2 - 2 / 64) / (2 - 2 / 2)
"""Two passes around a ring of W send 2·(W - 1)/W of a message: so many times more of it at 64 ranks than at 2."""
MOST = 2.1
QUICK = ("fp16-two-hop", "int8", "sign")
OF_EACH = rows([*QUICK, "terngrad", "mxfp4"], unless="sign".__eq__)
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in two_hop_names()]


@functools.cache
def counted(name: str, model: str, world_size: int) -> Traffic:
    return traffic_of(make_compressor(name), MODELS[model], world_size, device=DEVICES[model])


def moved(name: str, model: str, world_size: int) -> int:
    return counted(name, model, world_size).moved_bytes


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
        found = traffic_of(make_compressor(name), shapes, world_size, device=device)
        assert dataclasses.replace(workers.traffic, seconds_waiting=0.0) == found


@pytest.mark.parametrize("name", NAMES)
def test_64_ranks_cost_hardly_more_than_the_ring_itself_does(name: str) -> None:
    assert FLOOR * 0.99 < moved(name, "ResNet-18", 64) / moved(name, "ResNet-18", 2) < MOST


@pytest.mark.parametrize("name", [*OF_EACH, *thorough(sorted({*two_hop_names()} - {*QUICK, "terngrad", "mxfp4"}))])
def test_many_small_parameters_fill_the_rows_of_all_ranks_or_travel_as_sums(name: str) -> None:
    """Blocks are dealt by parameters' names: with 15 of each, or 7, no rank has many more than another.

    A parameter whose own blocks leave most of 64 rows empty is summed in fp32, whatever else is in its bucket.
    """
    (model,) = set(MODELS) - {"ResNet-18"}
    (elements,) = {math.prod(shape) for shape in MODELS[model].values()}
    two_hop = two_hop_of(name)
    assert isinstance(two_hop, TwoHop)
    if not two_hop.pays(elements, 64):
        dense = 4 * elements * len(MODELS[model])
        assert moved(name, model, 64) == 2 * 63 * dense // 64
    else:
        empty = padding(MODELS[model], two_hop.codec.block, 64)
        assert empty < 1.0  # with blocks of 512 each of these parameters has one, and one rank serves twice the average
        assert FLOOR * 0.99 < moved(name, model, 64) / moved(name, model, 2) < MOST * (1 + empty)


@A_ROW
def test_gathering_every_ranks_code_is_not_flat() -> None:
    """So that the bounds can fail: what gathers grows with the ranks, 63 times from 2 to 64."""
    small, large = (moved("sparse-loco", "ResNet-18", size) for size in (2, 64))
    assert large == 63 * small
