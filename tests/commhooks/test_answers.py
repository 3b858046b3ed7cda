"""What requests are answered with, and which answers may decide a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import AllGather, AllReduce, AllToAll, BucketView, Compressor, Context, Request, Result
from commhooks.language.compressor import Exchange
from tests.commhooks.workers import Workers, mean_of, normal, zeros

both_policies = pytest.mark.parametrize("policy", ["fifo", "fused"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notes(Compressor):
    """Ask for one of each kind, and note the shapes of the answers."""

    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict, hash=False)

    def compress(self, bucket: BucketView, context: Context) -> Generator[Request, Tensor, Result]:
        rows = bucket.memory.expand(context.world_size, -1).contiguous()
        requests = [
            AllReduce(bucket.memory),
            AllGather(bucket.memory),
            AllGather(bucket.memory.view(-1, 1)),
            AllToAll(rows),
        ]
        for number, request in enumerate(requests):
            answer = yield request
            self.shapes[f"{number} {request.kind}"] = tuple(answer.shape)
            assert answer.dtype == bucket.memory.dtype
        return Result(bucket.memory)


@both_policies
@pytest.mark.parametrize("size", [0, 5])
def test_answers_have_the_promised_shape_also_if_they_are_empty(policy: str, size: int) -> None:
    notes = Notes()
    Workers(notes, 3, zeros((size,)), policy=policy).step([[torch.ones(size)]] * 3)
    assert notes.shapes == {
        "0 all-reduce": (size,),
        "1 all-gather": (3, size),
        "2 all-gather": (3, size, 1),
        "3 all-to-all": (3, size),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class LosesInf(Compressor):
    """Exchange shares, and pass them on by way of a code that cannot carry an inf; count the steps committed."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        state = bucket.slots[0].state.replicated
        commits = state.setdefault("commits", torch.zeros(1))
        received = yield AllToAll(bucket.memory.view(context.world_size, -1))
        shares = yield AllGather(received.sum(0).clamp(-9, 9), last=True)
        context.commit(commits, commits + 1, context.all_finite(shares))
        bucket.memory.copy_(shares.reshape(-1))
        return Result(bucket.memory)


@both_policies
def test_what_only_one_rank_received_does_not_decide_the_step(policy: str) -> None:
    """Rank 0 sends rank 1 an inf, which nobody else sees: all ranks commit, or none."""
    workers = Workers(LosesInf(), 2, zeros((4,), (6,)), buckets=2, policy=policy)
    gradients = normal(workers.parameters, 2, seed=0)
    gradients[0][0][3] = torch.inf
    workers.step(gradients)
    commits = [[table.of(p).replicated["commits"].item() for p in workers.parameters] for table in workers.states]
    assert commits[0] == commits[1]


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16], ids=str)
def test_a_wire_ends_with_the_compressor_that_it_was_put_around(wire: torch.dtype) -> None:
    """In float64 a step's means and what is owed add up to some hundred roundings of 2**-53 of numbers below 10."""
    before = commhooks.WireDtype(inner=commhooks.AllReduceMean(), dtype=wire)
    compressor = commhooks.StartAfter(before=before, steps=2, inner=commhooks.PowerSGD(rank=1))
    workers = Workers(compressor, 2, zeros((24, 40), dtype=torch.float64))
    short = torch.zeros(24, 40, dtype=torch.float64)
    for step in range(5):
        gradients = normal(workers.parameters, 2, seed=step)
        mean = workers.step(gradients)[0][0]
        if step >= 2:
            short += mean_of(gradients, 0) - mean
    owed = torch.stack([workers.residual(rank, 0) for rank in range(2)]).mean(0)
    assert (short - owed).abs().max() <= 1e-12


@pytest.mark.parametrize("outer", [torch.float32, torch.bfloat16], ids=str)
def test_of_nested_wires_only_the_outermost_counts(outer: torch.dtype) -> None:
    inner = commhooks.PowerSGD(rank=1)
    nested = commhooks.WireDtype(inner=commhooks.WireDtype(inner=inner, dtype=torch.float16), dtype=outer)
    left: list[list[torch.Tensor]] = []
    for compressor in (nested, commhooks.WireDtype(inner=inner, dtype=outer)):
        workers = Workers(compressor, 2, zeros((24, 40), (7,)))
        means = [workers.step(normal(workers.parameters, 2, seed=step))[0] for step in range(3)][-1]
        left.append([*means, *(workers.residual(rank, 0) for rank in range(2))])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
