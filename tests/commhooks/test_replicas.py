"""Replicas stay equal over many buckets, on ranks that dawdle. What each rank runs is in replicas_in_worlds.py.

A process that used PyTorch's DDP aborts at its exit now and then, unless the model goes before the process group does.
It does here, so the exit code counts on both DDPs.
"""

from __future__ import annotations

import itertools
import os
import time

import pytest

from tests.commhooks import replicas_in_worlds as on_every_rank
from tests.commhooks.models import MODELS
from tests.commhooks.ranks import run_ranks

KINDS, WORLD_SIZES = ["core", "torch"], [2, 3, 4]
both_ddps = pytest.mark.parametrize("kind", KINDS)
world_sizes = pytest.mark.parametrize("world_size", WORLD_SIZES)
REPETITIONS = int(os.environ.get("SOAK_REPETITIONS", "20"))
"""Fewer are for a look at everything else that `make soak-hooks` runs: 20 take hours."""
ORDINARY = [("core", 2), ("core", 3), ("torch", 3), ("torch", 4)]
"""These have every hook, every policy and every number of buckets already."""


def check(kind: str, world_size: int, steps: int, seed: int, chosen: list[on_every_rank.Run]) -> None:
    """Assert that every rank had the same gradients in every step, and other ones in the next step."""
    arguments = (kind, chosen, steps, seed)
    ranks = run_ranks(on_every_rank.digests_of_runs, world_size, *arguments, check_exit=True, timeout=50.0 + 2 * steps)
    for number, run in enumerate(chosen):
        digests = [rank[number] for rank in ranks]
        differ = [step for step, of_ranks in enumerate(zip(*digests, strict=True)) if len(set(of_ranks)) > 1]
        assert not differ, f"{run}: replicas differ in steps {differ}"
        assert len(set(digests[0])) == steps, f"{run}: gradients repeat"


def long_runs(kind: str, world_size: int) -> list[list[on_every_rank.Run]]:
    """Return what each of 20 repetitions runs, beginning with another hook for each kind and world size.

    "fifo" over 40 buckets, 24,000 collectives, takes as long as all others together: it comes in every fourth one.
    """
    first = 5 * (KINDS.index(kind) * len(WORLD_SIZES) + WORLD_SIZES.index(world_size))
    return [
        [run for run in on_every_rank.runs(first + i) if (run.policy, run.buckets) != ("fifo", 40) or i % 4 == 0]
        for i in range(20)
    ]


def test_the_long_runs_have_every_hook_under_every_policy_over_every_number_of_buckets() -> None:
    planned = [long_runs(kind, world_size) for kind in KINDS for world_size in WORLD_SIZES]
    every = itertools.product(on_every_rank.HOOKS, ("fifo", "fused"), MODELS)
    assert {run for repetitions in planned for runs in repetitions for run in runs} == {
        on_every_rank.Run(hook=hook, policy=policy, buckets=buckets) for hook, policy, buckets in every
    }


def test_the_ordinary_runs_have_every_hook_and_every_policy_over_every_number_of_buckets() -> None:
    planned = [run for kind, world_size in ORDINARY for run in long_runs(kind, world_size)[0]]
    assert {run.hook for run in planned} == set(on_every_rank.HOOKS)
    assert {(run.policy, run.buckets) for run in planned} == set(itertools.product(("fifo", "fused"), MODELS))


@pytest.mark.parametrize(("kind", "world_size"), ORDINARY)
def test_replicas_agree_at_every_step_whatever_hook_policy_and_number_of_buckets(kind: str, world_size: int) -> None:
    check(kind, world_size, steps=5, seed=0, chosen=long_runs(kind, world_size)[0])


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@both_ddps
@world_sizes
def test_replicas_agree_for_300_steps_many_times(kind: str, world_size: int) -> None:
    for repetition, chosen in enumerate(long_runs(kind, world_size)[:REPETITIONS]):
        began = time.monotonic()
        check(kind, world_size, steps=300, seed=repetition, chosen=chosen)
        seconds = time.monotonic() - began
        print(f"\n{kind}, {world_size} ranks, repetition {repetition}: {seconds:.0f} s", end="", flush=True)
