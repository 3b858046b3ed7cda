"""Turns: who acts when, what counts, and on which rank; the steps that are timed in them; and their medians."""

from __future__ import annotations

import math
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from commhooks.experiments.launch import Tell, WorldError
from experiments.studies.medians import Ratio
from experiments.studies.ranks import on_ranks
from experiments.studies.turns import Order, drawn, forth_and_back, in_turns, on_slowest, rotated, turns_of


@pytest.mark.parametrize(
    ("order", "rounds"),
    [
        (forth_and_back, ["cba", "abc", "cba", "abc"]),
        (rotated, ["cab", "abc", "bca", "cab"]),
    ],
)
def test_an_order_holds_from_the_rounds_before_the_first_on(order: Order, rounds: list[str]) -> None:
    called: list[str] = []
    told: list[str] = []
    found = turns_of(
        {name: partial(called.append, name) for name in "abc"}, 3, warm_up=1, order=order, tell=told.append
    )
    assert ["".join(called[n : n + 3]) for n in range(0, 12, 3)] == rounds
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3, "c": 3}
    assert told == ["  warming up, 1 to go", "  1 of 3 turns", "  2 of 3 turns", "  3 of 3 turns"]


def test_a_drawn_order_is_the_same_on_every_rank_and_differs_between_rounds() -> None:
    names = list("abcdef")
    orders = [drawn(number, names) for number in range(20)]
    assert orders == [drawn(number, names) for number in range(20)]
    assert all(sorted(order) == names for order in orders) and len({"".join(order) for order in orders}) > 15


def slow_on_one(seconds: float, tell: Tell) -> tuple[list[float], list[float], int]:
    """Sleep on rank 1 alone; return what counts, and the threads."""
    own = {"sleeps": partial(time.sleep, seconds * dist.get_rank())}
    taken = in_turns(own, 2, warm_up=0, tell=tell)["sleeps"]
    return taken, on_slowest([1.0, 4.0] if dist.get_rank() else [3.0, 2.0]), torch.get_num_threads()


def fail(tell: Tell) -> None:
    """Raise on rank 1."""
    if dist.get_rank() == 1:
        raise LookupError("the needle is not in the haystack")


def test_a_turn_counts_as_on_the_slowest_rank_and_rank_0_returns_and_tells() -> None:
    told: list[str] = []
    taken, slowest, threads = on_ranks(partial(slow_on_one, 0.05), 2, told.append)
    assert min(taken) >= 0.05
    assert slowest == [3.0, 4.0]
    assert threads == 1
    assert told == ["  1 of 2 turns", "  2 of 2 turns"]


def test_a_rank_that_fails_fails_the_call() -> None:
    with pytest.raises(WorldError, match="the needle is not in the haystack"):
        on_ranks(fail, 2, print)


def around(seconds: float) -> list[float]:
    """Return nine turns, which differ by 1 %."""
    return [seconds * noise for noise in (1.0, 1.01, 0.99) * 3]


def test_a_ratio_is_taken_turn_by_turn_so_that_a_slow_turn_of_both_changes_nothing() -> None:
    theirs = around(1.0)
    theirs[3] *= 7
    ratio = Ratio.of([1.2 * seconds for seconds in theirs], theirs)
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((1.2, 1.2, 1.2))
    assert ratio.sign == 1


def test_one_disturbed_turn_does_not_widen_the_interval() -> None:
    disturbed = [*around(1.2)[:-1], 50.0]
    assert Ratio.of(disturbed, [1.0] * 9).high < 1.3


def test_the_interval_of_a_ratio_covers_its_median_in_19_of_20_trials() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.exp(torch.randn(2_000, 9, generator=generator)).tolist()
    held = sum(Ratio.of(draw, [1.0] * 9).low <= 1 <= Ratio.of(draw, [1.0] * 9).high for draw in draws)
    assert 0.95 - 3 * math.sqrt(0.95 * 0.05 / 2_000) < held / 2_000 < 0.98


def test_too_few_turns_have_no_finite_interval() -> None:
    ratio = Ratio.of([2.0] * 5, [1.0] * 5)
    assert ratio.sign == 0 and "too few turns" in ratio.text
    assert Ratio.of([2.0] * 6, [1.0] * 6).sign == 1
