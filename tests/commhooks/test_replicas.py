"""Replicas stay equal over many buckets, on ranks that dawdle.

A process that used PyTorch's DDP aborts at its exit now and then, unless the model goes before the process group does.
It does here, so the exit code counts on both DDPs.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from tests.commhooks.models import MODELS, Given, digest_of, gradients_of, wrap
from tests.commhooks.workers import normal, zeros
from tests.world import run_world
from tests.world.launcher import HANG_SECONDS

KINDS, WORLD_SIZES = ["core", "torch"], [2, 3, 4]
both_ddps = pytest.mark.parametrize("kind", KINDS)
world_sizes = pytest.mark.parametrize("world_size", WORLD_SIZES)
REPETITIONS = int(os.environ.get("SOAK_REPETITIONS", "20"))
"""Fewer are for a look at everything else that `make soak-hooks` runs: 20 take hours."""
ORDINARY = [("core", 2), ("core", 3), ("torch", 3), ("torch", 4)]
"""These have every hook, every policy and every number of buckets already."""
CHECKED = [("core", 2), ("torch", 3)]
"""Of these the exits of ordinary runs are checked too, and of all those of long ones."""
Plug = Callable[[nn.Module, str], Any]
"""Let a hook work for a model under a policy; return what tells its statistics."""


def attached(model: nn.Module, policy: Any, **settings: Any) -> Any:
    return commhooks.attach(model, commhooks.make_compressor(**settings), policy=policy)


def registered(model: nn.Module, policy: Any, hook: Any, **settings: Any) -> Any:
    state = commhooks.PowerSGDState(None, start_powerSGD_iter=2, policy=policy, **settings)
    model.register_comm_hook(state, hook)  # type: ignore[operator]
    return state


def powersgd(**settings: Any) -> Plug:
    return functools.partial(attached, name="powersgd", **settings)


HOOKS: dict[str, Plug] = {
    "rank 1": powersgd(rank=1),
    "rank 2, alternating": powersgd(rank=2, alternating=True),
    "rank 1, alternating, bf16 wire": powersgd(rank=1, alternating=True, wire=torch.bfloat16),
    "rank 4 of the whole bucket, bf16 wire": powersgd(rank=4, matrices="whole-bucket", wire=torch.bfloat16),
    "fp16 with error feedback": functools.partial(attached, name="fp16", error_feedback=True),
    "powerSGD_hook": functools.partial(registered, hook=commhooks.powerSGD_hook, matrix_approximation_rank=4),
    "batched_powerSGD_hook": functools.partial(registered, hook=commhooks.batched_powerSGD_hook),
    "fp16 of powerSGD_hook": functools.partial(
        registered, hook=commhooks.fp16_compress_wrapper(commhooks.powerSGD_hook)
    ),
    "bf16 of powerSGD_hook, alternating": functools.partial(
        registered,
        hook=commhooks.bf16_compress_wrapper(commhooks.powerSGD_hook),
        alternating=True,
        matrix_approximation_rank=2,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One hook under one policy on a model of so many buckets."""

    hook: str
    policy: str
    buckets: int


def runs(repetition: int) -> list[Run]:
    """Return every policy with every number of buckets, and with each a hook, another one in each repetition."""
    names = list(HOOKS)
    pairs = [(policy, buckets) for policy in ("fifo", "fused") for buckets in MODELS]
    return [
        Run(hook=names[(repetition + 2 * place) % len(names)], policy=policy, buckets=buckets)
        for place, (policy, buckets) in enumerate(pairs)
    ]


def digests_of_runs(rank: int, kind: str, chosen: list[Run], steps: int, seed: int) -> list[list[bytes]]:
    """Make the runs one after the other; return for each a digest of every step's gradients."""
    return [digests_of(kind, run, steps, random.Random(f"{seed}, rank {rank}")) for run in chosen]


def digests_of(kind: str, run: Run, steps: int, delays: random.Random) -> list[bytes]:
    """Train on a rank that is delayed at random, before and during steps."""
    of_shapes, bucket_cap_mb = MODELS[run.buckets]
    model = wrap(kind, Given(*of_shapes), bucket_cap_mb=bucket_cap_mb)
    hook = HOOKS[run.hook](model, run.policy)
    for weight in model.parameters():
        weight.register_hook(functools.partial(dawdle, delays, 0.5 / len(of_shapes)))
    gradients = normal(zeros(*of_shapes), dist.get_world_size(), seed=0)[dist.get_rank()]
    digests = []
    for step in range(steps):
        dawdle(delays, 0.1)
        model.zero_grad()
        model(*[gradient * math.cos(step) for gradient in gradients]).backward()
        digests.append(digest_of(gradients_of(model)))
    counted = hook.statistics()
    assert (counted.steps, counted.buckets) == (steps, 1 + (steps - 1) * run.buckets), counted  # one before the rebuild
    del model, hook, weight
    gc.collect()
    return digests


def dawdle(delays: random.Random, probability: float, gradient: Tensor | None = None) -> None:
    if delays.random() < probability:
        time.sleep(delays.random() * 0.01)


def check(kind: str, world_size: int, steps: int, seed: int, chosen: list[Run]) -> None:
    """Assert that every rank had the same gradients in every step, and other ones in the next step."""
    arguments = (kind, chosen, steps, seed)
    exits = True if steps > 4 or (kind, world_size) in CHECKED else None
    ranks = run_world(digests_of_runs, world_size, *arguments, check_exit=exits, timeout=HANG_SECONDS + 2 * steps)
    for number, run in enumerate(chosen):
        digests = [rank[number] for rank in ranks]
        differ = [step for step, of_ranks in enumerate(zip(*digests, strict=True)) if len(set(of_ranks)) > 1]
        assert not differ, f"{run}: replicas differ in steps {differ}"
        assert len(set(digests[0])) == steps, f"{run}: gradients repeat"


def long_runs(kind: str, world_size: int) -> list[list[Run]]:
    """Return what each of 20 repetitions runs, beginning with another hook for each kind and world size.

    "fifo" over 40 buckets, 24,000 collectives, takes as long as all others together: it comes in every fourth one.
    """
    first = 5 * (KINDS.index(kind) * len(WORLD_SIZES) + WORLD_SIZES.index(world_size))
    return [
        [run for run in runs(first + i) if (run.policy, run.buckets) != ("fifo", 40) or i % 4 == 0] for i in range(20)
    ]


@pytest.mark.parametrize(("kind", "world_size"), ORDINARY)
def test_replicas_agree_at_every_step_whatever_hook_policy_and_number_of_buckets(kind: str, world_size: int) -> None:
    check(kind, world_size, steps=4, seed=0, chosen=long_runs(kind, world_size)[0])


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
