"""Training with several workers in one process: the same as training on the whole batch, and what it counts."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import commhooks
from commhooks import AllReduceMean, Compressor, ErrorFeedback, TopK
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Context, Exchange
from experiments.lockstep import time_in_lockstep, train_in_lockstep
from experiments.tasks import Evaluation, Task, make_task
from experiments.tasks.digits import SIZES, Digits

STEPS, WORKERS = 12, 4


@dataclasses.dataclass(frozen=True)
class Keeping(Digits):
    """Digits that keep the last model that was judged."""

    models: list[nn.Module] = dataclasses.field(default_factory=list)

    def evaluate(self, model: nn.Module) -> Evaluation:
        self.models.append(model)
        return super().evaluate(model)


def digits() -> Task:
    return make_task("digits", "tiny")


def test_dense_workers_end_where_one_does_that_sees_all_their_images() -> None:
    task = Keeping(SIZES["tiny"], "tiny")
    train_in_lockstep(task, AllReduceMean(), seed=1, steps=STEPS, workers=WORKERS)
    model = task.model(1)
    optimizer = task.optimizer(model)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(step, STEPS)
        batches = [task.batch(1, step, rank, WORKERS) for rank in range(WORKERS)]
        inputs, targets = (torch.cat([getattr(b, name) for b in batches]) for name in ("inputs", "targets"))
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    for one, other in zip(task.models[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_same_seed_gives_the_same_numbers() -> None:
    compressor = commhooks.make_compressor("powersgd", rank=1)
    one, other = (train_in_lockstep(digits(), compressor, seed=3, steps=5, workers=2) for _ in range(2))
    assert one == other


def test_bytes_are_those_of_one_worker_and_step() -> None:
    elements = sum(p.numel() for p in digits().model(0).parameters())
    found = train_in_lockstep(digits(), AllReduceMean(), seed=0, steps=3, workers=WORKERS)
    assert (found.payload_bytes, found.gradient_bytes) == (4 * elements, 4 * elements)
    assert found.moved_bytes == pytest.approx(4 * elements * 2 * 3 / 4)  # a ring of four


def test_a_residual_is_measured_where_there_is_one() -> None:
    plain, fed = TopK(ratio=0.1), ErrorFeedback(inner=TopK(ratio=0.1))
    assert train_in_lockstep(digits(), plain, seed=0, steps=3, workers=2).residual is None
    once = train_in_lockstep(digits(), fed, seed=0, steps=1, workers=2).residual
    assert once is not None and math.sqrt(0.05) < once < math.sqrt(0.9)  # at least not nothing; at most 1 - k/n of |g|²


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone(Compressor):
    """Exchange nothing."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        for tile in bucket.tiles:
            tile.write(tile.form())
        yield from ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exploding(AllReduceMean):
    """Write infinity from the third step on."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        yield from super().compress(bucket, context)
        if context.step >= 2:
            bucket.memory.fill_(math.inf)


def test_workers_that_end_with_other_means_are_refused() -> None:
    with pytest.raises(ValueError, match="means of '1.weight' differ"):
        train_in_lockstep(digits(), Alone(), seed=0, steps=2, workers=2)


def test_a_run_that_diverges_ends_early_and_says_when() -> None:
    found = train_in_lockstep(digits(), Exploding(), seed=0, steps=50, workers=2)
    assert found.diverged == 4  # the step after is the first whose loss is not finite
    assert math.isnan(found.loss)


def test_compute_is_timed_against_a_copy() -> None:
    spread = time_in_lockstep(digits(), AllReduceMean(), seed=0, workers=2, rounds=3)
    assert 0 < spread.low <= spread.median <= spread.high
