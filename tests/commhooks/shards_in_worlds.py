"""What the tests of shards run on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from commhooks import make_compressor
from commhooks.scheduling.line import ProcessGroupLine
from tests.commhooks.shards import Sharded, shard_of, whole_means
from tests.commhooks.workers import normal, zeros

SHAPES = ((9, 16), (5,), (2, 3), (64, 33), (1,))


def as_in_lockstep(rank: int, names: Sequence[str], policy: str) -> list[str]:
    """Return where three steps over the process group differ from those of workers in one process."""
    ranks, wrong = dist.get_world_size(), []
    group = dist.distributed_c10d._get_default_group()
    for name in names:
        line = ProcessGroupLine(group, policy=policy, hook_timeout=30.0)
        here = Sharded(make_compressor(name), zeros(*SHAPES), [line])
        there = Sharded.in_lockstep(make_compressor(name), ranks, zeros(*SHAPES), policy=policy)
        for step in range(3):
            gradients = normal(here.parameters, ranks, seed=step)
            got, wanted = here.step([gradients[rank]])[0], there.step(gradients)[rank]
            same = all(map(torch.equal, got, wanted))
            if name == "all-reduce" and ranks > 2:  # sums are added up in another order
                wanted = [shard_of(mean, ranks, rank).float() for mean in whole_means(gradients)]
                same = all(torch.allclose(one, other, atol=1e-6) for one, other in zip(got, wanted, strict=True))
            wrong += [] if same else [f"{name}, step {step}"]
        kept, of_rank = here.residuals()[0], there.residuals()[rank]
        wrong += [] if all(map(torch.equal, kept, of_rank)) else [f"{name}: residuals"]
        here.engines[0].stop()
    return wrong


def an_inf(rank: int, name: str, policy: str) -> tuple[list[str], bool]:
    """Let the last rank have an inf in what another keeps; return what changed, and whether the next mean is fine."""
    ranks = dist.get_world_size()
    line = ProcessGroupLine(dist.distributed_c10d._get_default_group(), policy=policy, hook_timeout=30.0)
    workers = Sharded(make_compressor(name), zeros(*SHAPES), [line])
    workers.step([normal(workers.parameters, ranks, seed=0)[rank]])
    (before,) = workers.residuals()
    gradients = normal(workers.parameters, ranks, seed=1)[rank]
    if rank == ranks - 1:
        gradients[0][0, 3] = float("inf")
    workers.step([gradients])
    (after,) = workers.residuals()
    changed = [str(number) for number, pair in enumerate(zip(before, after, strict=True)) if not torch.equal(*pair)]
    (means,) = workers.step([normal(workers.parameters, ranks, seed=2)[rank]])
    workers.engines[0].stop()
    return changed, all(mean.isfinite().all() for mean in means)
