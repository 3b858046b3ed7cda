"""Choices for each parameter: within the budget, and no other choice is cheaper."""

from __future__ import annotations

import itertools
import random

import pytest

import commhooks
from commhooks.errors import SettingsError
from commhooks.planning.layers import Option, choose, per_layer
from commhooks.planning.profile import GradientProfile
from tests.commhooks.test_plan import a_probe, a_profile, hook


def brute_force(options: list[list[Option]], budget: float) -> float:
    """Return the least seconds of all choices within the budget."""
    every = itertools.product(*options)
    return min(sum(s for s, _ in chosen) for chosen in every if sum(e for _, e in chosen) <= budget)


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_within_the_budget_takes_less(seed: int) -> None:
    numbers = random.Random(seed)
    # Errors are whole steps of the grid, so that rounding up changes none.
    options = [
        [(1.0 + numbers.random(), 0.0), *((numbers.random(), numbers.randrange(1, 6000) / 20_000) for _ in range(3))]
        for _ in range(5)
    ]
    chosen = choose(options, 0.5)
    picked = [row[place] for row, place in zip(options, chosen, strict=True)]
    assert sum(error for _, error in picked) <= 0.5 + 1e-9
    assert sum(seconds for seconds, _ in picked) == pytest.approx(brute_force(options, 0.5 + 1e-9))


def test_without_a_budget_nothing_is_lost_and_with_a_large_one_all_take_the_cheapest() -> None:
    options = [[(3.0, 0.0), (2.0, 0.2), (1.0, 0.4)]] * 2
    assert choose(options, 0.0) == [0, 0]
    assert sorted(choose(options, 0.5)) == [0, 2]  # 4 seconds, as much as with 1 and 1
    assert choose(options, 0.9) == [2, 2]


def test_errors_between_two_steps_of_the_grid_are_rounded_up() -> None:
    options = [[(1.0, 0.0), (0.0, 0.250_01)]] * 2
    assert sorted(choose(options, 0.5)) == [0, 1]  # both would lose 0.50002


def test_the_choice_can_be_attached_and_spends_no_error_without_a_budget() -> None:
    shapes = {"big": (256, 256), "bias": (256,)}
    gradients = tuple(GradientProfile(name, shape, 4 * 256 * len(shape) ** 8, 0.1) for name, shape in shapes.items())
    profile = a_profile(hook("powersgd:rank=1", 0.112, 0.1), gradients=gradients)
    within = per_layer(profile, a_probe(), 0.999)
    assert isinstance(within, commhooks.PerParameter)
    assert [name for name, _ in within.rules] == ["big"]
    assert isinstance(commhooks.make_compressor(str(within)), commhooks.PerParameter)
    assert isinstance(per_layer(profile, a_probe(), 0.0), commhooks.AllReduceMean)
    with pytest.raises(SettingsError, match=r"budget=1.0\): the budget must be in \[0, 1\)"):
        per_layer(profile, a_probe(), 1.0)
