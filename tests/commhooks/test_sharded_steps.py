"""The step of a model that FSDP2 shards, by arithmetic."""

from __future__ import annotations

import math

import pytest

import commhooks
from commhooks.errors import SettingsError
from commhooks.experiments import planning
from commhooks.experiments.planning.predicting import probed_link
from commhooks.experiments.planning.profiles import GradientProfile, HookProfile, Profile, RoundProfile
from commhooks.experiments.planning.sharded import modules_in, sharded_step_of
from commhooks.experiments.planning.tables import profile_from_tables
from commhooks.experiments.timing.link import OF_PYTORCH, Link, NoLink
from commhooks.experiments.timing.payloads import rounds_of_shards
from commhooks.experiments.timing.sharded import PLAIN, ShardCosts, ShardedModule, sharded_step
from commhooks.experiments.timing.step_time import Step, step_time
from tests.commhooks.shards import Sharded
from tests.commhooks.test_plan import a_probe, a_profile, bucket, hook, parts
from tests.commhooks.workers import normal, zeros

BLOCKS = [ShardedModule(((64, 32), (64,)))] * 3
REST = ShardedModule(((128, 16),), stays=True)
LINK = Link(rate=1e8, latency=1e-4)


def plain(ranks: int) -> Step:
    return sharded_step([*BLOCKS, REST], None, ranks, compute=0.1, optimizer=0.01)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_sends_two_gathers_of_each_block_one_of_the_rest_and_a_reduction_of_all(ranks: int) -> None:
    in_blocks, rest = 4 * sum(block.elements for block in BLOCKS), 4 * REST.elements
    sent = step_time(plain(ranks), NoLink(), ranks).bytes_sent
    assert sent == (ranks - 1) * (3 * in_blocks + 2 * rest) // ranks


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


def test_a_modules_share_of_the_passes_counts_and_fsdp2_copies_what_it_exchanges() -> None:
    block = ShardedModule(((64, 32),))
    costs = ShardCosts(before=2e-6, after=3e-6, elements=2 * block.elements)
    step = sharded_step([block], commhooks.make_compressor("int8"), 2, compute=0.1, costs=costs, copy=1e-9)
    *gathers, reduction = step.buckets
    for gather in gathers:
        assert gather.stages[0].seconds == pytest.approx(1e-9 * block.elements / 2), "its shard into the message"
        assert gather.after == pytest.approx(1e-9 * block.elements), "all shards into the parameter"
    assert reduction.stages[0].seconds == pytest.approx(1e-9 * block.elements + 1e-6)
    assert reduction.after == pytest.approx(1e-9 / 2 * block.elements + 1.5e-6)


def test_a_collective_of_pytorch_takes_what_gloo_sends_for_it() -> None:
    link = Link(rate=1e6)
    ours, theirs = (link.transfer(f"reduce-scatter{end}", 10**7, 4) for end in ("", OF_PYTORCH))
    all_reduce = link.transfer("all-reduce", 10**7, 4)
    assert theirs.seconds == pytest.approx(all_reduce.seconds, rel=0.01)  # but for the headers of more messages
    assert ours.seconds < 0.7 * theirs.seconds and ours.bytes_sent == theirs.bytes_sent
    ring = Link(rate=1e6, algorithm="ring")
    assert ring.transfer(f"reduce-scatter{OF_PYTORCH}", 10**7, 4) == ring.transfer("reduce-scatter", 10**7, 4)


def test_tables_shard_a_model_into_modules_as_large_as_buckets() -> None:
    profile = profile_from_tables(2e7, 2, compute=0.1, hooks=["bf16", "int8", "powersgd:rank=4"], copy=4e-10)
    assert len(modules_in(profile.gradients)) == 4  # of 4, 28, 28 and 20 MB: matrices of a million, in 1 and 25 MiB
    found = planning.plan(profile, Link(rate=1e9), sharded=True)
    assert {one.label for one in found.choices} == {PLAIN, "all-reduce", "bf16", "int8"}
    assert found.of(PLAIN).bytes_sent == 3 * 4 * 20_000_000 // 2 and found.compared == PLAIN
    assert found.of("int8").bytes_sent < found.of("bf16").bytes_sent


def profiled() -> Profile:
    """Return the profile of a model with two blocks, under int8, of which 20 ms come before the codes are sent."""
    shapes = {"embed.weight": (128, 16), "norms.0.weight": (16,)}
    shapes |= {
        f"blocks.{number}.fc.{name}": shape for number in "01" for name, shape in (("w", (64, 32)), ("b", (64,)))
    }
    gradients = [GradientProfile(name, shape, 4 * math.prod(shape), 0.1) for name, shape in shapes.items()]
    rounds = RoundProfile(0.01, (("all-to-all", 500),)), RoundProfile(0.02, (("all-gather", 250),))
    int8 = HookProfile("int8", "fifo", parts(0.25), (bucket("ab", 1, rounds, 0.04), bucket("cd", 3, rounds, 0.04)))
    hooks = {one.hook: one for one in (int8, hook("powersgd:rank=2", 0.11, 0.1))}
    return a_profile(*hooks.values(), gradients=tuple(gradients))


def test_a_profiled_step_has_the_compute_and_the_passes_that_were_measured_and_an_optimizer_of_shards() -> None:
    profile = profiled()
    step = sharded_step_of(profile, profile.hooks["int8"])
    assert [step.compute, step.optimizer] == pytest.approx([0.1, 0.010 / 2])
    stages = [stage.seconds for one in step.buckets for stage in one.stages]
    assert sum(stages) == pytest.approx(2 * 0.01), "before the codes are sent; FSDP2's copies are not in a profile"
    assert sum(one.after for one in step.buckets) == pytest.approx(2 * 0.02), "of the answers; no mean is sent again"
    with pytest.raises(SettingsError, match="shard alone"):
        sharded_step_of(profile, profile.hooks["powersgd:rank=2"])


def test_a_plan_of_a_sharded_model_has_the_compressors_that_return_shards_on_the_link_that_was_probed() -> None:
    profile, probe = profiled(), a_probe(per_byte=1e-6)
    link = probed_link(probe)
    assert link.transfer("all-reduce", 10**6, 2).seconds == pytest.approx(1.0, rel=0.1)  # and headers of packets
    found = planning.plan(profile, probe, sharded=True)
    assert {one.label for one in found.choices} == {PLAIN, "all-reduce", "int8"}
    for name, own in ((PLAIN, None), ("int8", profile.hooks["int8"])):
        time = step_time(sharded_step_of(profile, own), link, 2)
        choice = found.of(name)
        assert (choice.seconds, choice.bytes_sent) == (time.seconds, time.bytes_sent)
        assert choice.speed_up == found.of(PLAIN).seconds / time.seconds
    assert (found.of(PLAIN).code, found.of("int8").code) == ("", 'commhooks.attach_sharded(model, "int8")')
