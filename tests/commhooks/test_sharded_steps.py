"""The step of a model that FSDP2 shards, by arithmetic."""

from __future__ import annotations

import dataclasses
import math

import pytest
from torch import nn

import commhooks
from commhooks.communicators.links import OF_PYTORCH, Link
from commhooks.errors import SettingsError
from commhooks.planning.costs import HookCosts, Sample
from commhooks.planning.payloads import rounds_of_shards
from commhooks.planning.predicting import NoLink
from commhooks.planning.sharded import PLAIN, ShardedModule, modules_of, sharded_step
from commhooks.planning.step_time import Step, step_time
from tests.commhooks.shards import Sharded
from tests.commhooks.workers import normal, zeros

BLOCKS = [ShardedModule(((64, 32), (64,)))] * 3
REST = ShardedModule(((128, 16),), stays=True)
LINK = Link(rate=1e8, latency=1e-4)


def plain(ranks: int, *, compute: float = 0.1, overlaps: bool = False) -> Step:
    return sharded_step([*BLOCKS, REST], None, ranks, compute=compute, optimizer=0.01, overlaps=overlaps)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_sends_two_gathers_of_each_block_one_of_the_rest_and_a_reduction_of_all(ranks: int) -> None:
    in_blocks, rest = 4 * sum(block.elements for block in BLOCKS), 4 * REST.elements
    sent = step_time(plain(ranks), NoLink(), ranks).bytes_sent
    assert sent == (ranks - 1) * (3 * in_blocks + 2 * rest) // ranks


def test_a_step_that_waits_for_each_exchange_adds_them_all_up() -> None:
    step = plain(4)
    sends = [send for bucket in step.buckets for stage in bucket.stages for send in stage.collectives]
    assert len(sends) == 3 * len(BLOCKS) + 2
    found = step_time(step, LINK, 4)
    assert found.seconds == pytest.approx(0.11 + sum(LINK.transfer(*send, 4).seconds for send in sends))
    assert found.communication == pytest.approx(found.waiting)


def test_overlap_hides_exchanges_but_for_the_first_gather_and_the_last_reduction() -> None:
    """With little to send, in a long step."""
    step = plain(4, compute=10.0, overlaps=True)
    first, last = step.buckets[0].stages[0].collectives[0], step.buckets[-1].stages[0].collectives[0]
    assert (first[0], last[0]) == (f"all-gather{OF_PYTORCH}", f"reduce-scatter{OF_PYTORCH}")
    shown = LINK.transfer(*first, 4).seconds + LINK.transfer(*last, 4).seconds
    assert step_time(step, LINK, 4).seconds == pytest.approx(10.01 + shown)


def test_overlap_never_takes_longer() -> None:
    for compute in (1e-4, 0.01, 1.0):
        hidden, shown = (step_time(plain(4, compute=compute, overlaps=one), LINK, 4).seconds for one in (True, False))
        assert hidden <= shown + 1e-12


@pytest.mark.parametrize("name", ["all-reduce", "bf16", "int8", "int4"])
def test_a_compressor_sends_what_it_is_counted_to_send_and_ranks_agree_on_turns(name: str) -> None:
    compressor = commhooks.make_compressor(name)
    step = sharded_step([*BLOCKS, REST], compressor, 2, compute=0.1)
    reductions = [bucket.stages for bucket in step.buckets if len(bucket.stages) == 2]
    assert len(reductions) == len(BLOCKS) + 1
    for (agreed, sent), module in zip(reductions, [*BLOCKS, REST], strict=True):
        assert agreed.collectives == (("all-gather", 32),)
        counted = rounds_of_shards(compressor, {str(n): p for n, p in enumerate(zeros(*module.trained))}, 2)
        assert (sent.collectives,) == counted


@pytest.mark.parametrize("name", ["int8", "top-k", "random-k"])
def test_shards_of_different_sizes_are_counted_as_they_are_sent(name: str) -> None:
    shapes, compressor = ((17, 5), (5,), (1,), (64, 3)), commhooks.make_compressor(name)
    counted = rounds_of_shards(compressor, {str(number): one for number, one in enumerate(zeros(*shapes))}, 3)
    workers = Sharded.in_lockstep(compressor, 3, zeros(*shapes))
    workers.step(normal(zeros(*shapes), 3, seed=0))
    sent = sum(size for sends in counted for _, size in sends)
    assert sent == workers.engines[0].statistics().payload_bytes


def test_of_two_hops_the_codes_and_their_means_cost_and_fsdp2_copies_what_it_exchanges() -> None:
    samples = tuple(Sample(size, (2.0 * size, 3.0 * size, 5.0 * size)) for size in (1, 1000))
    vector = Sample(1, (2.0, 3.0, 5.0))
    costs = dataclasses.replace(
        HookCosts.free("TwoHop(codec=Int8())"), matrices=samples, vector=vector, growth=(0.0, 0.0, 0.0)
    )
    block = ShardedModule(((64, 32),))
    step = sharded_step([block], commhooks.make_compressor("int8"), 2, compute=0.1, costs=costs, copy=1e-9)
    *gathers, reduction = step.buckets
    for gather in gathers:
        assert gather.stages[0].seconds == pytest.approx(1e-9 * block.elements / 2), "its shard into the message"
        assert gather.after == pytest.approx(1e-9 * block.elements), "all shards into the parameter"
    assert reduction.stages[0].seconds == pytest.approx(1e-9 * (1 + 2) * block.elements)
    assert reduction.after == pytest.approx(1e-9 * (1 / 2 + 3) * block.elements)


def test_a_collective_of_pytorch_takes_what_gloo_sends_for_it() -> None:
    link = Link(rate=1e6)
    ours, theirs = (link.transfer(f"reduce-scatter{end}", 10**7, 4) for end in ("", OF_PYTORCH))
    all_reduce = link.transfer("all-reduce", 10**7, 4)
    assert theirs.seconds == pytest.approx(all_reduce.seconds, rel=0.01)  # but for the headers of more messages
    assert ours.seconds < 0.7 * theirs.seconds and ours.bytes_sent == theirs.bytes_sent
    ring = Link(rate=1e6, algorithm="ring")
    assert ring.transfer(f"reduce-scatter{OF_PYTORCH}", 10**7, 4) == ring.transfer("reduce-scatter", 10**7, 4)


def test_an_estimate_of_a_sharded_model_compares_with_plain_fsdp2() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    found = commhooks.estimate(model, compute=0.01, ranks=2, rate=1e7, sharded=True, copy_rate=1e10)
    assert found.baseline == PLAIN and found.buckets == len(modules_of(model)) == 2
    assert found.of(PLAIN).speed_up == 1 and math.isnan(found.of(PLAIN).break_even)
    assert found.of("int4").time.bytes_sent < found.of("int8").time.bytes_sent < found.of("bf16").time.bytes_sent
    assert {one.hook for one in found.hooks} >= {PLAIN, "all-reduce", "bf16", "int8", "int4"}
    assert not any(one.hook.startswith("powersgd") for one in found.hooks)


def test_an_estimate_of_a_number_takes_modules_as_large_as_buckets() -> None:
    found = commhooks.estimate(2e7, compute=0.1, ranks=2, rate=1e9, sharded=True, hooks=["bf16"], copy_rate=1e10)
    assert found.buckets == 4  # of 4, 28, 28 and 20 MB: matrices of a million, in 1 and 25 MiB
    assert found.of(PLAIN).time.bytes_sent == 3 * 4 * found.parameters // 2


def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(SettingsError, match="averages whole gradients"):
        commhooks.estimate(1e6, compute=0.1, ranks=2, rate=1e9, sharded=True, hooks=["powersgd:rank=4"], copy_rate=1e10)
    with pytest.raises(SettingsError, match="FSDP2 exchanges modules"):
        commhooks.estimate(1e6, compute=0.1, ranks=2, rate=1e9, sharded=True, bucket_cap_mb=4, copy_rate=1e10)
