"""The guard under Accelerate and Lightning: no word of a plain run, and a word of one that bypasses the wrapper."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.frameworks import guard_in_worlds as worlds
from tests.frameworks.huggingface import settle_in
from tests.frameworks.launch import run_ranks
from tests.guard.situations import RIGHT
from tests.world import run_world

pytestmark = pytest.mark.frameworks


def accelerated(rank: int) -> dict[str, worlds.Ended]:
    settle_in(rank)
    return worlds.under_accelerate(rank)


def test_accelerate_meets_every_kind_of_bypass_under_every_wrapper() -> None:
    check(worlds.ACCELERATE, run_world(accelerated, 2, timeout=120, check_exit=False))


def test_lightning_meets_every_kind_of_bypass_under_every_wrapper() -> None:
    check(worlds.LIGHTNING, run_ranks(worlds.under_lightning, 2, timeout=150, check_exit=False))


def check(expected: Mapping[str, str], ranks: list[dict[str, worlds.Ended]]) -> None:
    """Raise unless each run ended as expected, and with equal replicas if nothing was said."""
    first, second = ranks
    for case, (kind, parameters) in first.items():
        of_case = expected[case.partition(", ")[0]]
        assert kind == of_case or second[case][0] == of_case, f"{case}: {first[case]}, {second[case]}"
        assert of_case != RIGHT or second[case] == (kind, parameters), f"{case}: replicas differ"
