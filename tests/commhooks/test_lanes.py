"""Engines that share a line: one thread, one group, one order. What each rank runs is in lanes_in_worlds.py."""

from __future__ import annotations

import pytest
import torch

import commhooks
from commhooks import CollectiveError, Exchanger, lockstep_lines
from tests.commhooks import lanes_in_worlds as on_every_rank
from tests.commhooks.lanes_in_worlds import Ran, values_of
from tests.commhooks.ranks import run_ranks


def check(ran: Ran) -> None:
    assert ran.wrong == [] and ran.threads == 1 and ran.groups == 1
    assert ran.bytes_by_lane == ran.bytes_of_line > 0
    print(f"the longest wait for a round behind others: {1000 * ran.longest_wait:.1f} ms")


def test_lanes_in_one_order_get_their_own_means_over_one_thread_and_group() -> None:
    for ran in run_ranks(on_every_rank.in_one_order, 2, 16, 60):
        check(ran)


@pytest.mark.soak
def test_16_lanes_for_1000_rounds() -> None:
    for ran in run_ranks(on_every_rank.in_one_order, 2, 16, 1000):
        check(ran)


@pytest.mark.parametrize("policy", ["fifo", "fused"])
def test_lanes_in_another_order_are_named_on_every_rank_and_never_mixed(policy: str) -> None:
    one = "lane 0 (part 0)" if policy == "fifo" else "lane 1 (part 1)"
    for of_rank in run_ranks(on_every_rank.in_another_order, 2, policy, check_exit=False):
        for told in of_rank:
            assert told.error == "CollectiveError" and told.seconds < 10
            assert "ranks hand in different things" in told.text
            assert f"rank 0: step 1, bucket 0 of {one}" in told.text
            assert "rank 1: step 1, bucket 0 of lane 2 (part 2)" in told.text


def test_a_failure_on_one_lane_ends_all_and_names_it() -> None:
    failing, waiting = run_ranks(on_every_rank.one_fails, 2, check_exit=False)
    for told in (*failing, *waiting):
        assert told.error in ("CompressorError", "CollectiveError", "RuntimeError")
        assert "rank 0, lane 1 (part 1), step 2, bucket 0 (parameters w): ZeroDivisionError: on purpose" in told.text
    assert failing[-1].text.startswith(
        "rank 0, lane 2 (part 2), step 3, bucket 0 (parameters w): not started, because of"
    )


def test_closing_a_lane_leaves_the_others_and_closing_the_last_ends_the_thread() -> None:
    for told, threads in run_ranks(on_every_rank.closed_one_by_one, 2):
        assert all("the attachment was stopped" in one.text for one in told)
        assert threads == 0


def test_a_refused_comparison_ends_only_what_it_was_about() -> None:
    for of_rank in run_ranks(on_every_rank.refused, 2):
        opening, again, replacing = of_rank
        for told in (opening, again):
            assert (
                "ranks disagree" in told.text and "dtype: torch.bfloat16 (rank 0), torch.float16 (rank 1)" in told.text
            )
        assert replacing.error == "AttachError" and "ranks disagree" in replacing.text


def test_workers_of_one_process_have_lanes_too() -> None:
    lines = lockstep_lines(2)
    of_ranks = [[Exchanger(values_of(0, 0), "fp16", line=line, name=f"part {n}") for n in range(3)] for line in lines]
    for turn in range(4):
        values = [[values_of(rank, turn + n) for n in range(3)] for rank in range(2)]
        both = [one for of_rank in of_ranks for one in of_rank]
        commhooks.average_in_lockstep(both, [one for of_rank in values for one in of_rank])
        for n in range(3):
            assert torch.equal(values[0][n]["w"], values[1][n]["w"])
            assert float(values[0][n]["w"][0]) == turn + n + 0.5
    assert {exchanger.statistics().steps for of_rank in of_ranks for exchanger in of_rank} == {4}


def test_workers_of_one_process_that_swap_lanes_are_told() -> None:
    (one, other), (another, swapped) = (
        [Exchanger(values_of(0, 0), "fp16", line=x) for _ in "ab"] for x in lockstep_lines(2)
    )
    with pytest.raises(CollectiveError, match="rank 0: step 0, bucket 0 of lane 0; rank 1: step 0, bucket 0 of lane 1"):
        commhooks.average_in_lockstep([one, swapped, other, another], [values_of(n % 2, 0) for n in range(4)])
