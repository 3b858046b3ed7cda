"""The step-time model: hand-computed steps, and laws that hold for any step, link and number of ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commhooks.communicators import Collective
from commhooks.communicators.collective import KINDS
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.timing.link import Link, Transfer
from commhooks.experiments.timing.step_time import Bucket, Stage, Step, step_time
from tests.tiers import A_ROW

MB = 1_000_000
PLAIN = Link(rate=100e6, algorithm="ring")  # an all-reduce of 1 MB between two ranks takes 80 ms


def dense(seconds: float, megabytes: float = 1) -> Stage:
    return Stage(seconds, (("all-reduce", round(megabytes * MB)),))


def a_step(*buckets: Bucket, **changes: Any) -> Step:
    return Step(**{"compute": 1.0, "optimizer": 0.1, "buckets": buckets, **changes})


TWO_ROUNDS = (
    Bucket(0.6, (dense(0.05), dense(0.05)), after=0.05),
    Bucket(1.0, (dense(0.05), dense(0.05)), after=0.05),
)


def test_communication_that_fits_beside_the_backward_pass_costs_nothing_but_the_last_bucket() -> None:
    found = step_time(a_step(Bucket(0.6, (dense(0.0),)), Bucket(1.0, (dense(0.0),))), PLAIN, 2)
    assert dataclasses.astuple(found) == pytest.approx((1.18, 1.1, 0.0, 0.08, 0.16, 2 * MB))


def test_with_one_core_compression_delays_the_backward_pass_and_with_two_it_runs_beside_it() -> None:
    # The first bucket's last round is on the link from 0.78 on, and the rest of its work falls into the backward pass.
    # One core: the last gradients are there at 1.15; then three times 0.05 and twice 0.08. Two cores: at 1.0.
    one, two = (step_time(a_step(*TWO_ROUNDS, cores=cores), PLAIN, 2) for cores in (1, 2))
    assert one.seconds == pytest.approx(1.15 + 3 * 0.05 + 2 * 0.08 + 0.1)
    assert two.seconds == pytest.approx(1.0 + 3 * 0.05 + 2 * 0.08 + 0.1)
    assert (one.compression, two.compression) == pytest.approx((0.3, 0.15))
    assert one.waiting == pytest.approx(two.waiting) == pytest.approx(2 * 0.08)


def test_the_processor_time_of_transfers_delays_the_backward_pass() -> None:
    costly = dataclasses.replace(PLAIN, seconds_per_byte=4e-8)  # half of the 80 ms
    buckets = (Bucket(0.5, (dense(0.0),)), Bucket(1.0, ()))
    assert step_time(a_step(*buckets), costly, 2).seconds == pytest.approx(1.14)
    assert step_time(a_step(*buckets, cores=2), costly, 2).seconds == pytest.approx(1.1)
    # A quarter: of the transfer from 0.5 to 0.58 s, 0.05 s are left for compute until 0.567, and half of compression.
    cheaper, compressed = dataclasses.replace(costly, seconds_per_byte=2e-8), Bucket(0.55, (dense(0.02),))
    assert step_time(a_step(buckets[0], compressed, compute=0.55), cheaper, 2).seconds == pytest.approx(0.77)
    slower = dataclasses.replace(costly, seconds_per_byte=2e-7)
    assert slower.transfer("all-reduce", MB, 2).seconds == pytest.approx(0.2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_transfer_takes_what_the_emulated_link_makes_of_it(kind: str, ranks: int) -> None:
    emulated = LinkSettings(bits_per_second=100e6, latency_seconds=1e-3)
    tensor = torch.zeros(ranks, 1000)
    seconds = emulated.seconds_for(Collective(kind, tensor), ranks)  # type: ignore[arg-type]  # 'expected "Literal[...]"': it is one
    link = Link(rate=100e6, latency=1e-3)
    assert link.transfer(kind, 4000 * ranks, ranks).seconds == pytest.approx(seconds, rel=1e-12)


STAGES = st.builds(
    Stage,
    st.floats(0, 0.1),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 10 * MB)), min_size=1, max_size=2).map(tuple),
)
BUCKETS = st.lists(
    st.builds(Bucket, st.floats(0, 1), st.lists(STAGES, max_size=3).map(tuple), st.floats(0, 0.1)), max_size=4
).map(lambda buckets: tuple(sorted(buckets, key=lambda bucket: bucket.ready)))
STEPS = st.builds(
    Step,
    compute=st.just(1.0),
    optimizer=st.floats(0, 0.1),
    buckets=BUCKETS,
    policy=st.sampled_from(["fifo", "fused"]),
    cores=st.integers(1, 2),
)
LINKS = st.builds(
    Link,
    rate=st.floats(1e6, 1e12),
    latency=st.floats(0, 0.01),
    algorithm=st.sampled_from(["gloo", "ring"]),
    seconds_per_byte=st.sampled_from([0.0, 1e-9]),
)


@given(STEPS, LINKS, st.sampled_from([1, 2, 8]))
def test_the_parts_of_a_step_add_up(step: Step, link: Link, ranks: int) -> None:
    found = step_time(step, link, ranks)
    assert found.compute + found.compression + found.waiting == pytest.approx(found.seconds)
    assert found.seconds >= found.compute - 1e-9 and 0 < found.utilisation <= 1 + 1e-9
    transfers = transfers_of(step, link, ranks)
    busy = sum(transfer.seconds + transfer.processor_seconds for transfer in transfers)
    assert found.seconds <= found.compute + busy + 2 * compression_of(step) + 1e-6


def transfers_of(step: Step, link: Link, ranks: int) -> list[Transfer]:
    stages = [stage for bucket in step.buckets for stage in bucket.stages]
    return [link.transfer(kind, size, ranks) for stage in stages for kind, size in stage.collectives]


def compression_of(step: Step) -> float:
    return sum(bucket.after + sum(stage.seconds for stage in bucket.stages) for bucket in step.buckets)


@A_ROW
@given(STEPS, LINKS, st.sampled_from([2, 8]), st.floats(1, 100))
def test_a_faster_link_is_never_slower_and_without_a_limit_nothing_waits(
    step: Step, link: Link, ranks: int, factor: float
) -> None:
    found = step_time(step, link, ranks)
    faster = step_time(step, dataclasses.replace(link, rate=factor * link.rate), ranks)
    # Not exactly: an answer that comes earlier may be unpacked before the next bucket is compressed, and not after.
    assert faster.seconds <= found.seconds + compression_of(step) + 1e-9
    ideal = Link(rate=math.inf)
    assert step_time(step, ideal, ranks).waiting == pytest.approx(0, abs=1e-9)
    plain = dataclasses.replace(
        step, buckets=tuple(Bucket(b.ready, tuple(Stage(0.0, s.collectives) for s in b.stages)) for b in step.buckets)
    )
    assert step_time(plain, dataclasses.replace(link, rate=factor * link.rate), ranks).seconds <= (
        step_time(plain, link, ranks).seconds + 1e-9
    )
    assert step_time(plain, ideal, ranks).utilisation == pytest.approx(1)


@given(LINKS, st.sampled_from(["all-reduce", "all-gather", "reduce-scatter"]), st.integers(0, MB), st.integers(3, 64))
def test_more_ranks_and_more_latency_are_never_faster(link: Link, kind: str, payload: int, ranks: int) -> None:
    seconds = link.transfer(kind, payload, ranks).seconds
    assert link.transfer(kind, payload, ranks + 1).seconds >= seconds - 1e-12
    slower = dataclasses.replace(link, latency=link.latency + 0.01)
    assert slower.transfer(kind, payload, ranks).seconds > seconds


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Link(rate=0.0), "rate must be above zero"),
        (lambda: Link(rate=1e9, algorithm="tree"), "must be one of gloo, ring"),
        (lambda: PLAIN.transfer("all-reduce", 8, 0), "ranks must be at least 1"),
        (lambda: PLAIN.transfer("broadcast", 8, 2), "kind must be one of all-reduce"),
        (lambda: a_step(Bucket(1.5, ())), "ready one after another"),
        (lambda: a_step(Bucket(0.5, ()), Bucket(0.4, ())), "ready one after another"),
        (lambda: a_step(Bucket(0.5, (dense(-1.0),))), "must be in"),
    ],
)
def test_what_cannot_be_is_rejected_in_words(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
