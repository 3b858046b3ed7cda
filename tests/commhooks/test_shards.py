"""Buckets of shards, of which each rank gets the mean of its own: what a reduce-scatter of FSDP2 needs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commhooks import ErrorFeedback, PerParameter, WireDtype, make_compressor, schedule
from commhooks.codecs import E3M0, Codebook
from commhooks.compressors import (
    AllReduceMean,
    Cast,
    PowerSGD,
    RandomBlock,
    RandomK,
    Signum,
    Threshold,
    TopK,
    TwoHop,
)
from commhooks.compressors.codecs import FP8, MXFP4, QSGD, Codec, Half, Int4, Int8, Natural, Sign, TernGrad
from commhooks.errors import CommHooksError, GradientError
from commhooks.language import Compressor
from commhooks.scheduling.connection import ProcessGroupConnection
from commhooks.scheduling.lockstep import lockstep_connections
from commhooks.wrappers.hierarchical import Hierarchical
from tests.commhooks.shards import BucketOfShards, Sharded, shard_of, whole_means
from tests.commhooks.workers import Workers, normal, zeros
from tests.tiers import covering, rows
from tests.world import on_ranks

SHAPES = ((9, 16), (5,), (2, 3), (64, 33), (1,), (0, 4), ())

CODECS: list[Codec] = [
    Half(block=16, dtype=torch.bfloat16),  # the first: nothing is left out of a gradient in bf16
    Int8(block=16), Int4(block=32), FP8(block=16), MXFP4(), E3M0(block=32), Codebook(block=32), Sign(block=32),
    QSGD(block=16, levels=15), TernGrad(block=16), Natural(block=16),
    Half(block=16, dtype=torch.bfloat16, stochastic=True),
]  # fmt: skip


@on_ranks("ranks")
@pytest.mark.parametrize(("ranks", "policy"), [(2, "fused"), (4, "fifo")])
def test_over_a_process_group_the_same_comes_out(rank: int, ranks: int, policy: Any) -> None:
    """In three steps."""
    group = dist.distributed_c10d._get_default_group()
    for name in NAMES:
        connection = ProcessGroupConnection(group, policy=policy, hook_timeout=30.0)
        here = Sharded(make_compressor(name), zeros(*SHAPES), [connection])
        there = Sharded.in_lockstep(make_compressor(name), ranks, zeros(*SHAPES), policy=policy)
        for step in range(3):
            gradients = normal(here.parameters, ranks, seed=step)
            got, wanted = here.step([gradients[rank]])[0], there.step(gradients)[rank]
            assert all(map(torch.equal, got, wanted)), (name, step)
        kept, of_rank = here.residuals()[0], there.residuals()[rank]
        assert all(map(torch.equal, kept, of_rank)), f"{name}: residuals"
        here.engines[0].stop()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_without_compression_every_rank_gets_its_row_of_the_mean(dtype: torch.dtype, ranks: int) -> None:
    parameters = zeros(*SHAPES, dtype=dtype)
    gradients = normal(parameters, ranks, seed=1)
    whole = Workers(AllReduceMean(), ranks, parameters).step(gradients)[0]
    for rank, means in enumerate(Sharded.in_lockstep(AllReduceMean(), ranks, parameters).step(gradients)):
        for mean, of_all in zip(means, whole, strict=True):
            assert torch.equal(mean, shard_of(of_all, ranks, rank))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cast_is_added_up_in_the_gradients_own_dtype(dtype: torch.dtype) -> None:
    parameters = zeros(*SHAPES)
    gradients = normal(parameters, 3, seed=2)
    cast = [[one.to(dtype).float() for one in of_rank] for of_rank in gradients]
    for rank, means in enumerate(Sharded.in_lockstep(Cast(dtype=dtype), 3, parameters).step(gradients)):
        for mean, of_all in zip(means, whole_means(cast), strict=True):
            assert torch.allclose(mean.double(), shard_of(of_all, 3, rank), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        *rows([(codec, torch.float32) for codec in CODECS], unless=lambda one: isinstance(one[0], (Half, Int8))),
        *rows([(codec, torch.bfloat16) for codec in CODECS[1:]], unless=lambda one: isinstance(one[0], Int4)),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Codec) else str(one),
)
def test_what_a_code_leaves_out_of_any_shard_is_kept_by_the_rank_that_sent_it(codec: Codec, dtype: torch.dtype) -> None:
    damping = min(1.0, 1 / (1 + codec.relative_error())) if codec.is_unbiased else None
    assert keeps_what_is_not_sent(TwoHop(codec=codec, server_feedback=False, damping=damping), dtype, 3)


def keeps_what_is_not_sent(compressor: Compressor, dtype: torch.dtype, ranks: int) -> bool:
    """Return whether anything is kept; sent and kept must add up to what was to be sent, in units of the mean."""
    parameters = zeros(*SHAPES, dtype=dtype)
    workers = Sharded.in_lockstep(ErrorFeedback(inner=compressor), ranks, parameters)
    wanted = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    got = [[shard_of(total, ranks, rank).clone() for total in wanted] for rank in range(ranks)]
    for step in range(4):
        gradients = normal(parameters, ranks, seed=step)
        for total, mean in zip(wanted, whole_means(gradients), strict=True):
            total.add_(mean)
        for own, means in zip(got, workers.step(gradients), strict=True):
            for received, mean in zip(own, means, strict=True):
                received.add_(mean)
    kept = [torch.stack(of_ranks).double().mean(0) for of_ranks in zip(*workers.residuals(), strict=True)]
    unit = torch.finfo(dtype).eps
    for number, total in enumerate(wanted):
        for rank in range(ranks):
            owed = shard_of(kept[number].view(total.shape), ranks, rank) if kept[number].numel() else 0.0
            missing = shard_of(total, ranks, rank) - got[rank][number] - owed
            assert not missing.numel() or float(missing.abs().max()) <= 40 * unit, (number, rank)
    return sum(float(one.norm()) for one in kept) > 0


SPARSE = [
    TopK(ratio=0.1), TopK(ratio=0.03, indices="block-12"), TopK(ratio=0.03, indices="int32"),
    TopK(ratio=0.5, indices="bitmap"), TopK(ratio=1.0), Threshold(threshold=1.0, capacity=0.2), RandomK(ratio=0.1),
    RandomBlock(ratio=0.3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("compressor", "dtype", "ranks"), covering(SPARSE, [torch.float32, torch.bfloat16], [1, 2, 3], fast=6), ids=str
)
def test_elements_that_are_not_sent_of_any_shard_are_kept_by_the_rank_that_chose(
    compressor: Compressor, dtype: torch.dtype, ranks: int
) -> None:
    assert keeps_what_is_not_sent(compressor, dtype, ranks) == (compressor != TopK(ratio=1.0))


@pytest.mark.parametrize("indices", ["auto", "int32", "block-12", "block-16", "bitmap"])
def test_the_largest_of_each_shard_are_added_up_in_rank_order(indices: Any) -> None:
    """As many of every shard as of a parameter of its size; also of shards that are smaller than others."""
    parameters = zeros(*SHAPES)
    gradients = normal(parameters, 3, seed=5)
    for rank, means in enumerate(Sharded.in_lockstep(TopK(ratio=0.1, indices=indices), 3, parameters).step(gradients)):
        for number, mean in enumerate(means):
            expected = torch.zeros_like(mean)
            for own in (shard_of(of_rank[number], 3, rank) for of_rank in gradients):
                k = math.ceil(0.1 * own.numel())
                at = own.abs().topk(k).indices
                expected[at] += own[at] / 3
            assert torch.equal(mean, expected), (rank, number)


KEEPING = [
    ErrorFeedback(inner=TwoHop(codec=Int4(block=16), server_feedback=False)),
    ErrorFeedback(inner=TwoHop(codec=Sign(block=16), server_feedback=False)),
    ErrorFeedback(inner=Cast(dtype=torch.bfloat16)),
    PerParameter(rules=(("layer0", AllReduceMean()),), otherwise=ErrorFeedback(inner=TwoHop(codec=Int8(block=16)))),
    ErrorFeedback(inner=TopK(ratio=0.1)),
    ErrorFeedback(inner=RandomBlock(ratio=0.1)),
]


@pytest.mark.parametrize(
    ("compressor", "bad", "policy", "ranks"),
    covering(KEEPING, [math.inf, math.nan], ["fifo", "fused"], [2, 4], fast=4),
    ids=str,
)
def test_what_is_not_finite_on_one_rank_commits_nothing_on_any(
    compressor: Compressor, bad: float, policy: str, ranks: int
) -> None:
    parameters = zeros(*SHAPES)
    workers, undisturbed = (Sharded.in_lockstep(compressor, ranks, parameters, policy=policy) for _ in range(2))
    for each in (workers, undisturbed):
        each.step(normal(parameters, ranks, seed=0))
    before = workers.residuals()
    spoiled = normal(parameters, ranks, seed=1)
    spoiled[ranks - 1][0][0, 3] = bad  # the first rank keeps it
    assert not all(mean.isfinite().all() for mean in workers.step(spoiled)[0])
    for own, after in zip(before, workers.residuals(), strict=True):
        assert all(map(torch.equal, own, after))
    for engine in undisturbed.engines:
        engine.step += 1
    again = normal(parameters, ranks, seed=2)
    for means, others in zip(workers.step(again), undisturbed.step(again), strict=True):
        assert all(map(torch.equal, means, others))
    assert not all(map(torch.equal, before[0], workers.residuals()[0]))


@pytest.mark.parametrize(("size", "is_kept"), [(1000.0, True), (65504.0, False)])
def test_a_code_that_fp16_cannot_hold_commits_nothing(size: float, is_kept: bool) -> None:
    """What `Natural` makes of the largest number of fp16 is a power of two above it."""
    parameters = zeros((4, 16), dtype=torch.float16)
    workers = Sharded.in_lockstep(
        ErrorFeedback(inner=TwoHop(codec=Natural(block=16), server_feedback=False)), 2, parameters
    )
    workers.step(normal(parameters, 2, seed=0))
    before = workers.residuals()
    gradients = normal(parameters, 2, seed=1)
    gradients[1][0].fill_(size)
    workers.step(gradients)
    for own, after in zip(before, workers.residuals(), strict=True):
        assert all(map(torch.equal, own, after)) is not is_kept


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_sends_what_the_others_keep_and_no_more(ranks: int) -> None:
    parameters = zeros((64, 32), (32,))
    gradients = normal(parameters, ranks, seed=4)
    width = sum(BucketOfShards(parameters, gradients[0], ranks, 0).chunks())
    moved = {}
    for label, compressor in {
        "all-reduce": AllReduceMean(),
        "cast": Cast(dtype=torch.bfloat16),
        "int8": TwoHop(codec=Int8(block=32)),
        "kept": ErrorFeedback(inner=TwoHop(codec=Int8(block=32))),
        "top-k": ErrorFeedback(inner=TopK(ratio=0.05, indices="block-16")),
    }.items():
        workers = Sharded.in_lockstep(compressor, ranks, parameters)
        workers.step(gradients)
        statistics = workers.engines[0].statistics()
        assert statistics.collectives == 1, label
        moved[label] = statistics.moved_bytes
    others, blocks = ranks - 1, 64 // ranks + (32 // ranks) // 32
    ends = (32 // ranks) % 32
    assert moved["all-reduce"] == others * 4 * (width + 3)
    assert moved["cast"] == others * 2 * (width + 3)
    flag = 4
    entries = math.ceil(0.05 * 64 * 32 / ranks) + math.ceil(0.05 * 32 / ranks)
    assert moved["top-k"] == others * (entries * (4 + 2) + flag + -entries * 2 % 4)
    assert moved["int8"] == moved["kept"] == others * ((32 + 4) * blocks + 4 * ends + flag)


@pytest.mark.parametrize(
    "compressor",
    [
        PowerSGD(rank=2),
        Signum(),
        WireDtype(inner=AllReduceMean(), dtype=torch.bfloat16),
        Hierarchical(inner=AllReduceMean(), size=1),
        PerParameter(rules=(("layer0", PowerSGD(rank=1)),)),
        schedule((0, AllReduceMean()), (5, PowerSGD(rank=1))),
    ],
    ids=str,
)
def test_what_averages_whole_gradients_only_says_so_before_the_first_step(compressor: Compressor) -> None:
    assert not compressor.scatters
    parameters = zeros((8, 8), (4,))
    workers = Sharded.in_lockstep(compressor, 2, parameters)
    with pytest.raises(CommHooksError, match="consists of shards.* averages whole gradients"):
        workers.step(normal(parameters, 2, seed=0))
    with pytest.raises(CommHooksError, match="shards.* cannot be undone"):
        Sharded.in_lockstep(AllReduceMean(), 2, parameters, atomic=True).step(normal(parameters, 2, seed=0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"_chunks": [16, 4]}, r"a matrix of shape \(2, 39\), in chunks of \[16, 4\] elements, cannot hold 2 shards"),
        ({"_chunks": [32]}, "cannot hold 2 shards"),
        ({"_chunks": [36, 4]}, "cannot hold 2 shards"),
        ({"_memory": torch.zeros(3, 39)}, "cannot hold 2 shards"),
        ({"of_rank": torch.zeros(38)}, r"output must be of shape \(39,\)"),
        ({"of_rank": torch.zeros(39).half()}, r"output must be of shape .* \(got \(39,\), torch.float16"),
    ],
)
def test_a_bucket_that_cannot_be_is_refused(wrong: dict[str, object], message: str) -> None:
    parameters = zeros((8, 8), (8,))
    bucket = BucketOfShards(parameters, normal(parameters, 1, seed=0)[0], 2, 0)
    for name, value in wrong.items():
        setattr(bucket, name, value)
    with pytest.raises(GradientError, match=message):
        Sharded(AllReduceMean(), parameters, lockstep_connections(2)).engines[0].run(bucket)


def test_by_default_the_mean_of_shards_goes_to_this_ranks_row() -> None:
    parameters = zeros((8, 8), (8,))
    gradients = normal(parameters, 2, seed=0)
    workers = Sharded.in_lockstep(AllReduceMean(), 2, parameters)
    buckets = [BucketOfShards(parameters, gradients[rank], 2, rank) for rank in range(2)]
    for engine, bucket in zip(workers.engines, buckets, strict=True):
        without_output: Any = SimpleNamespace(
            **{name: getattr(bucket, name) for name in ("index", "buffer", "chunks", "parameters", "is_last")}
        )
        engine.run(without_output)
    workers.take_turns()
    (mean, _) = whole_means(gradients)
    for rank, bucket in enumerate(buckets):
        assert torch.allclose(bucket.buffer()[rank, :32].double(), shard_of(mean, 2, rank), atol=1e-6)


NAMES = [
    "all-reduce", "bf16", "top-k:ratio=0.1", "threshold:threshold=0.5,capacity=0.1", "random-k:ratio=0.1",
    "TwoHop(codec=Int8(block=16))", "ErrorFeedback(inner=TwoHop(codec=QSGD(block=16)))",
]  # fmt: skip
