"""What requests are answered with, and which answers may decide a step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import commhooks
from commhooks.compressors import AllReduceMean
from commhooks.language import AllGather, AllToAll, BucketView, Compressor, Context, Entry, Exchange, Judge, Part, Place
from tests.commhooks.workers import Workers, mean_of, normal, zeros

both_policies = pytest.mark.parametrize("policy", ["fifo", "fused"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LosesInf(Compressor):
    """Exchange shares, and pass them on by way of a code that cannot carry an inf; count the steps committed."""

    def state(self, place: Place) -> dict[str, Entry]:
        return {"commits": Entry(kind="replicated", shape=(1,))}

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        (slot,) = bucket.slots
        (received,) = yield AllToAll(Part(bucket.memory.view(context.world_size, -1)))
        (shares,) = yield AllGather(Part(received.sum(0).clamp(-9, 9)), last=True)
        finite = yield Judge(shares)
        slot.commit("commits", slot.state("commits") + 1, finite)
        slot.write(shares.reshape(-1))


@both_policies
def test_what_only_one_rank_received_does_not_decide_the_step(policy: str) -> None:
    """Rank 0 sends rank 1 an inf, which nobody else sees: all ranks commit, or none."""
    workers = Workers(LosesInf(), 2, zeros((4,), (6,)), buckets=2, policy=policy)
    gradients = normal(workers.parameters, 2, seed=0)
    gradients[0][0][3] = torch.inf
    workers.step(gradients)
    commits = [[table.of(p)["commits"].item() for p in workers.parameters] for table in workers.states]
    assert commits[0] == commits[1] == [1.0, 1.0]


@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16], ids=str)
def test_a_wire_ends_with_the_compressor_that_it_was_put_around(wire: torch.dtype) -> None:
    """In float64 a step's means and what is owed add up to some hundred roundings of 2**-53 of numbers below 10."""
    before = commhooks.WireDtype(inner=AllReduceMean(), dtype=wire)
    compressor = commhooks.StartAfter(before=before, steps=2, inner=commhooks.make_compressor("powersgd", rank=1))
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
    inner = commhooks.make_compressor("powersgd", rank=1)
    nested = commhooks.WireDtype(inner=commhooks.WireDtype(inner=inner, dtype=torch.float16), dtype=outer)
    left: list[list[torch.Tensor]] = []
    for compressor in (nested, commhooks.WireDtype(inner=inner, dtype=outer)):
        workers = Workers(compressor, 2, zeros((24, 40), (7,)))
        means = [workers.step(normal(workers.parameters, 2, seed=step))[0] for step in range(3)][-1]
        left.append([*means, *(workers.residual(rank, 0) for rank in range(2))])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
