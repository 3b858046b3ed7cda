"""Branches that come and go, ranks that run out of inputs, layers that are unfrozen. See dynamic_in_worlds.py."""

from __future__ import annotations

import pytest

from tests.commhooks import dynamic_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])
ways = pytest.mark.parametrize(
    ("how", "case"),
    [
        ("fifo", "powersgd-2"),
        ("fused", "powersgd-2"),
        ("hook", "powersgd-2"),
        ("fifo", "powersgd-2-fp16-wire"),
        ("fused", "powersgd-2-alternating"),
        ("fifo", "fp16-feedback"),
    ],
)


@both_ddps
@ways
def test_a_parameter_that_no_rank_uses_keeps_its_state_and_nothing_is_lost(kind: str, how: str, case: str) -> None:
    run_ranks(on_every_rank.branches_come_and_go, 2, kind, how, case)


@both_ddps
@ways
def test_a_rank_that_has_joined_takes_part_with_zeros_and_keeps_what_it_owes(kind: str, how: str, case: str) -> None:
    run_ranks(on_every_rank.uneven_inputs, 2, kind, how, case)


@both_ddps
@pytest.mark.parametrize("policy", ["fifo", "fused"])
@pytest.mark.parametrize("matrices", ["first-dimension", "whole-bucket"])
def test_a_step_that_is_undone_leaves_a_rank_that_has_joined_what_it_owes(
    kind: str, policy: str, matrices: str
) -> None:
    run_ranks(on_every_rank.spoilt_after_joining, 2, kind, policy, matrices)


@both_ddps
def test_a_rank_that_has_joined_keeps_what_it_owes_when_buckets_are_cut(kind: str) -> None:
    run_ranks(on_every_rank.joined_when_buckets_are_cut, 2, kind)


@both_ddps
def test_state_goes_with_names_when_layers_are_unfrozen(kind: str) -> None:
    run_ranks(on_every_rank.unfreezing, 2, kind)


@both_ddps
def test_where_unused_parameters_are_counted_messages_are_packed_into_the_same_memory(kind: str) -> None:
    for early, late in run_ranks(on_every_rank.memory_of_messages, 2, kind):
        assert early == late
