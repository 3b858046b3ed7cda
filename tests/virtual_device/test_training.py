"""Training on the virtual device: ddp_core and real backward passes, over NCCL, on two ranks that are processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.virtual_device import begin, ranks, report, training
from tests.world import run_world

pytestmark = pytest.mark.virtual_device

RUNS = ["eager", "late", "random:1", "random:2"]
SCENARIOS = [
    training.no_sync,
    training.own_stream,
    training.replacing,
    training.exchanging,
    training.averaging_seldom,
    training.adapting,
    training.hooks_of_pytorch,
    training.sharded,
    training.sharded_apart,
    training.replicas_apart,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_training_does_not_depend_on_the_schedule(scenario: Callable[[int], list[Tensor]]) -> None:
    first, second = run_world(
        _in_every_run, 2, scenario, backend="nccl", environment=ranks.environment("eager"), timeout=100.0
    )
    assert first == second  # replicas, and means


def _in_every_run(rank: int, scenario: Callable[[int], list[Tensor]]) -> list[list[Any]]:
    """Return what the scenario computes, if that is the same in all runs."""
    results: list[list[Tensor]] = []
    for run in RUNS:
        schedule, seed = ranks.parse(run)
        begin(schedule, seed + rank)
        results.append(scenario(rank))
        races = report().races
        assert races == (), (run, races)
        assert all(torch.equal(*pair) for pair in zip(results[-1], results[0], strict=True)), run
    assert all(tensor.isfinite().all() for tensor in results[0])
    return [tensor.tolist() for tensor in results[0]]


@pytest.mark.parametrize("place", training.UNORDERED)
def test_streams_of_fsdp2_that_are_not_ordered_are_a_race(place: str) -> None:
    """Each has its own for reductions and for what is done with their results."""
    run_world(_without_order, 2, place, backend="nccl", environment=ranks.environment("late"))


def _without_order(rank: int, place: str) -> None:
    calls = 0

    def leave_unordered(_what: object) -> None:  # a Mock would keep it from being freed
        nonlocal calls
        calls += 1

    with mock.patch(place.replace(":", "."), leave_unordered):
        training.UNORDERED[place](rank)
    assert calls
    races = report().races
    begin("late")
    assert any("in no order" in race for race in races)
