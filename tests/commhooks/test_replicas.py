"""Replicas stay equal over many buckets, on ranks that dawdle. What each rank runs is in replicas_in_worlds.py.

A process that used PyTorch's DDP aborts at its exit now and then, unless the model goes before the process group does.
It does here, so the exit code counts on both DDPs.
"""

from __future__ import annotations

import itertools
import time

import pytest

from tests.commhooks import replicas_in_worlds as on_every_rank
from tests.commhooks.ranks import run_ranks

both_ddps = pytest.mark.parametrize("kind", ["core", "torch"])
world_sizes = pytest.mark.parametrize("world_size", [2, 3, 4])


def check(kind: str, world_size: int, steps: int, repetition: int) -> None:
    """Demand that every rank had the same gradients in every step, and other ones in the next step."""
    chosen = on_every_rank.runs(repetition)
    arguments = (kind, chosen, steps, repetition)
    ranks = run_ranks(on_every_rank.digests_of_runs, world_size, *arguments, check_exit=True, timeout=50.0 + steps)
    for number, run in enumerate(chosen):
        digests = [rank[number] for rank in ranks]
        differ = [step for step, of_ranks in enumerate(zip(*digests, strict=True)) if len(set(of_ranks)) > 1]
        assert not differ, f"{run}: replicas differ in steps {differ}"
        assert len(set(digests[0])) == steps, f"{run}: gradients repeat"


def test_every_hook_meets_every_policy_and_number_of_buckets_in_14_repetitions() -> None:
    met = {run for repetition in range(14) for run in on_every_rank.runs(repetition)}
    every = itertools.product(on_every_rank.HOOKS, ("fifo", "fused"), on_every_rank.MODELS)
    assert met == {on_every_rank.Run(hook=hook, policy=policy, buckets=buckets) for hook, policy, buckets in every}


@both_ddps
@world_sizes
def test_replicas_agree_at_every_step_whatever_hook_policy_and_number_of_buckets(kind: str, world_size: int) -> None:
    check(kind, world_size, steps=5, repetition=world_size if kind == "core" else world_size + 7)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@both_ddps
@world_sizes
def test_replicas_agree_for_300_steps_20_times(kind: str, world_size: int) -> None:
    for repetition in range(20):
        began = time.monotonic()
        check(kind, world_size, steps=300, repetition=repetition)
        print(
            f"\n{kind}, {world_size} ranks, repetition {repetition}: {time.monotonic() - began:.0f} s",
            end="",
            flush=True,
        )
