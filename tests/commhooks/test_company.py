"""Hooks beside other users of the process group. What each rank runs is in company_in_worlds.py."""

from __future__ import annotations

import pytest

from tests.commhooks import company_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])
both_policies = pytest.mark.parametrize("policy", ["fifo", "fused"])
WORLDS: dict[str, tuple[int, list[list[int]]]] = {
    "all of 2 ranks": (2, []),
    "two pairs of 4 ranks": (4, [[0, 2], [1, 3]]),
    "2 of 3 ranks": (3, [[0, 2]]),
}
worlds = pytest.mark.parametrize("world", WORLDS)


def check(kind: str, policy: str, world: str, steps: int) -> None:
    world_size, groups = WORLDS[world]
    timeout = 50.0 + steps
    for differ in run_ranks(on_every_rank.company, world_size, kind, policy, steps, groups, timeout=timeout):
        assert differ == []


@pytest.mark.parametrize(
    ("kind", "policy", "world"),
    [
        ("core", "fifo", "all of 2 ranks"),
        ("torch", "fused", "all of 2 ranks"),
        ("core", "fused", "two pairs of 4 ranks"),
        ("torch", "fifo", "two pairs of 4 ranks"),
        ("core", "fifo", "2 of 3 ranks"),
        ("torch", "fused", "2 of 3 ranks"),
    ],
)
def test_two_models_and_the_users_collectives_in_one_backward_pass_are_right(
    kind: str, policy: str, world: str
) -> None:
    """Any two of a DDP, a policy and a world meet here; below all three do with each other."""
    check(kind, policy, world, steps=15)


@pytest.mark.soak
@pytest.mark.timeout(600)
@both_ddps
@both_policies
@worlds
def test_two_models_and_the_users_collectives_are_right_for_100_steps(kind: str, policy: str, world: str) -> None:
    check(kind, policy, world, steps=100)


@both_ddps
def test_stateless_hooks_average_over_their_subgroup(kind: str) -> None:
    run_ranks(on_every_rank.stateless_hooks_on_subgroups, 4, kind)


@both_ddps
def test_models_under_one_stateless_hook_get_the_means_they_get_alone(kind: str) -> None:
    assert run_ranks(on_every_rank.two_models_under_one_stateless_hook, 2, kind) == [[], []]


def test_buckets_of_one_index_and_size_get_the_means_they_get_alone() -> None:
    assert run_ranks(on_every_rank.buckets_of_one_index_and_size, 2) == [[], []]
