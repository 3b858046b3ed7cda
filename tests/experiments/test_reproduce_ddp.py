"""What the pages on the DDP paper's figures 2, 6, 7 and 12 find in made-up measurements, and the hooks they time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.links.linked_group import LinkedGroup
from experiments.studies.medians import Ratio, milliseconds
from experiments.studies.reproduce import Reproduction, load_reproduction
from experiments.studies.reproduce.ddp import figure_2, figure_7, figure_12, hooks
from experiments.studies.reproduce.ddp.figure_6 import Settings as Settings6
from experiments.studies.reproduce.ddp.turns import end_groups, groups_on, of_slowest
from tests.ddp_core.facts import Facts
from tests.parity.training import ddp_class

facts = Facts(check_exit=False)  # PyTorch's DDP aborts in about 6 % of exits


def around(seconds: float) -> list[float]:
    """Return nine turns, which differ by 1 %."""
    return [seconds * noise for noise in (1.0, 1.01, 0.99) * 3]


def swinging(seconds: float) -> list[float]:
    """Return nine turns, which differ by 20 %."""
    return [seconds * noise for noise in (1.0, 1.2, 0.8) * 3]


def rows(*turns: list[float]) -> list[dict[str, Any]]:
    """Return the turns of sizes, from one bucket per gradient to one for all."""
    sizes = ["0", *map(str, range(1, len(turns) - 1)), "all"]
    return [{"size": size, "buckets": 1, "seconds": seconds} for size, seconds in zip(sizes, turns, strict=True)]


def findings(name: str, settings: object, measured: dict[str, Any]) -> str:
    reproduction: Reproduction = load_reproduction(name)
    return "\n".join(block for block in reproduction.show(settings, measured) if isinstance(block, str))


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
    assert ratio.sign == 0 and "too few turns" in ratio.text and "too few turns" in ratio.saved
    assert Ratio.of([2.0] * 6, [1.0] * 6).sign == 1


def test_milliseconds_have_quartiles() -> None:
    assert milliseconds([0.1, 0.2, 0.3]) == "200 (150 to 250)"


def test_an_optimum_between_the_extremes_is_named_with_what_they_lose() -> None:
    text = figure_7.optimum(rows(around(1.5), around(1.0), around(1.1), around(1.3)))
    assert text == (
        "the optimum lies between the extremes: the median is lowest with buckets of 1 MiB; one bucket per gradient "
        "takes 1.50 (1.50 to 1.50) times as long; all in one bucket takes 1.30 (1.30 to 1.30) times as long."
    )


def test_no_optimum_is_named_if_an_extreme_is_no_slower_or_is_the_fastest() -> None:
    alike = figure_7.optimum(rows(around(1.5), around(1.0), around(1.1), swinging(1.05)))
    assert alike.startswith("no optimum") and "does not differ measurably from all in one bucket" in alike
    fastest = figure_7.optimum(rows(around(1.5), around(1.2), around(1.1), around(1.0)))
    assert fastest.startswith("no optimum") and "lowest with all in one bucket" in fastest
    assert "one bucket per gradient takes 1.50" in fastest


def test_sizes_that_do_not_differ_from_the_fastest_are_named() -> None:
    text = figure_7.optimum(rows(around(1.5), around(1.0), swinging(1.05), around(1.5)))
    assert text.startswith("the optimum lies between")
    assert text.endswith("Buckets of 2 MiB do not differ measurably from the fastest.")


def test_calls_saturate_at_the_smallest_size_near_the_fastest_by_time_for_each_element() -> None:
    made = [
        {"size": 1_000, "measured": 1_000_000, "seconds": around(1.0)},  # a sixtieth of the elements
        {"size": 500_000, "measured": 60_000_000, "seconds": around(3.2)},
        {"size": 5_000_000, "measured": 60_000_000, "seconds": around(3.0)},
        {"size": 60_000_000, "measured": 60_000_000, "seconds": around(4.5)},
    ]
    text = figure_2.saturation(made)
    assert text.startswith(
        "the fastest calls have 5 M elements, and the smallest whose time is within 10 % of theirs have 500 K"
    )
    assert "calls of 1 K take 20.0" in text and "calls of 60 M take 1.50" in text


def test_half_way_through_a_backward_pass_gradients_and_elements_are_counted() -> None:
    settings = figure_2.Settings(places={"loopback": 10}, models={"m": "gpt"}, steps=2)
    model = {"model": "m", "elements": [10, 30, 60], "passes": [[1.0, 0.4, 0.1], [2.0, 0.8, 0.2]]}
    made = {"size": 10, "measured": 10, "seconds": [1.0] * 6}
    text = findings("ddp-figure-2", settings, {"places": [{"place": "loopback", "rows": [made]}], "models": [model]})
    assert "after 10 % (10 to 10) of the backward pass" in text
    assert "67 % (67 to 67) of the gradients are, which hold 90 % (90 to 90)" in text


@pytest.mark.parametrize(
    ("exposed", "said"),
    [
        (0.1, r"saves 40 % \(40 to 40\) of an iteration. It hides 80 % \(80 to 80\)"),
        (0.5, "no difference between iterations with and without overlap"),
        (1.0, "overlap costs time"),
    ],
)
def test_overlap_saves_nothing_or_costs(exposed: float, said: str) -> None:
    parts = {"buckets": 2, "forward": [0.1] * 7, "backward": [0.3] * 7, "optimizer": [0.1] * 7}
    cases = [
        {"model": "m", "ddp": "core", "overlap": way, "taken": parts | {"exposed": [seconds] * 7}}
        for way, seconds in (("with", exposed), ("without", 0.5))
    ]
    assert re.search(said, findings("ddp-figure-6", Settings6(), {"cases": cases}))


def test_groups_are_called_faster_or_slower_only_where_a_difference_was_seen() -> None:
    case = {"model": "m", "ddp": "core", "buckets": 9}
    seconds = {"1": around(1.0), "3": [0.8 * one for one in around(1.0)], "5": around(1.0)}
    text = figure_12.compared([case | {"seconds": seconds}], "1", ["3", "5"])
    assert text == (
        "compared with 1 group, faster: m, ddp_core with 3 groups (0.80 (0.80 to 0.80) of the time); no difference "
        "seen: m, ddp_core with 5 groups."
    )
    seconds = dict.fromkeys("135", around(1.0))
    assert "no difference seen: all models" in figure_12.compared([case | {"seconds": seconds}], "1", ["3", "5"])


def test_a_step_counts_as_on_the_rank_that_took_longest_and_its_parts_stay_together() -> None:
    spent = torch.tensor([[[[1.0, 5.0], [4.0, 4.0]]], [[[3.0, 2.0], [1.0, 9.0]]]])  # 2 ranks, 1 entrant, 2 turns
    assert of_slowest(spent).tolist() == [[[1.0, 5.0], [1.0, 9.0]]]


def trained(
    which: str, register: Callable[[Any, hooks.Groups], None] | None, groups: hooks.Groups
) -> tuple[Any, list[int]]:
    """Return a model after two steps, and how many all-reduces had begun at the last gradient of each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    ddp = ddp_class(which)(model, process_group=groups[0], bucket_cap_mb=1e-6)
    if register is not None:
        register(ddp, groups)
    begun: list[int] = []
    next(model.parameters()).register_hook(lambda _: begun.append(all_reduces(groups)))
    for step in range(2):
        model.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        before = all_reduces(groups)
        ddp(torch.randn(4, 8)).square().mean().backward()
        begun[-1] -= before
    return ddp, begun


def all_reduces(groups: hooks.Groups) -> int:
    linked = [group for group in groups if isinstance(group, LinkedGroup)]
    assert len(linked) == len(groups), "an emulated link with a rate counts what passes it"
    return sum(group.traffic["all-reduce"].collectives for group in linked if "all-reduce" in group.traffic)


@facts
def every_hook_averages_as_a_ddp_without_one_does(rank: int) -> None:
    ways = (hooks.overlap, hooks.do_not_overlap, partial(hooks.use_groups_in_turn, count=3))
    for which in ("torch", "ours"):
        groups = groups_on(LinkSettings(bits_per_second=1e9), 3)
        means = [[parameter.grad for parameter in trained(which, way, groups)[0].parameters()] for way in (None, *ways)]
        for others in means[1:]:
            assert all(map(torch.equal, means[0], others))
        end_groups(groups)


@facts
def all_reduces_begin_before_the_last_gradient_only_with_overlap(rank: int) -> None:
    for which in ("torch", "ours"):
        groups = groups_on(LinkSettings(bits_per_second=1e9))
        assert trained(which, hooks.overlap, groups)[1][-1] > 0
        assert trained(which, hooks.do_not_overlap, groups)[1][-1] == 0
        assert all_reduces(groups) > 0
        end_groups(groups)


@facts
def groups_take_turns_bucket_by_bucket(rank: int) -> None:
    for which in ("torch", "ours"):
        groups = groups_on(LinkSettings(bits_per_second=1e9), 3)
        trained(which, partial(hooks.use_groups_in_turn, count=3), groups)
        # One bucket in the first step, and then a bucket for each of the 8 parameters.
        assert [all_reduces([group]) for group in groups] == [1 + 3, 3, 2]
        end_groups(groups)


test_hooks = facts.tests()
