"""Several buckets in one exchange: where units end, what they average, and what becomes of one that never ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.compressors.powersgd.powersgd import PowerSGD
from commhooks.engine import units
from commhooks.engine.units import Handed, Units
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Context, Exchange
from commhooks.language.entries import ParameterState
from commhooks.scheduling.policy import PolicyName
from commhooks.testing.workers import GivenBucket, Workers
from commhooks.wrappers.error_feedback import ErrorFeedback
from tests.commhooks.workers import normal, zeros

SHAPES = (64, 48), (7,), (64, 48), (32, 5, 3, 3), (40, 30), (9,), (3, 40, 30)
RANKS = 2


def test_units_end_where_the_last_step_says_on_every_rank() -> None:
    step = [("a",), ("b",), ("c",), ("d",)]
    fifo = Units("fifo", joins=True)
    assert _ends(fifo, step) == [["a"], ["b"], ["c"], ["d"]], "nobody knows what follows"
    assert _ends(fifo, step) == [["a"], ["b", "c", "d"]]
    large = units.UNIT_ELEMENTS["fifo"] // 2
    assert _ends(fifo, step, elements=large) == [["a"], ["b", "c"], ["d"]]
    other = [("a",), ("b",), ("e",), ("d",)]
    assert _ends(fifo, other) == [["a"], ["b", "e"], ["d"]], "from the first unknown bucket on, each goes at once"
    assert _ends(fifo, other[:3], ends=False) == [["a"]], "b and e wait for d, which never comes: they fail"
    assert _ends(fifo, other) == [["a"], ["b"], ["e"], ["d"]]


def test_ranks_that_saw_different_parts_of_a_step_divide_the_next_one_alike() -> None:
    step = [("a",), ("b",), ("c",), ("d",), ("e",)]
    large = units.UNIT_ELEMENTS["fifo"] // 2
    ranks = [Units("fifo", joins=True) for _ in range(3)]
    for came, rank in enumerate(ranks, start=2):
        for _ in range(2):
            _ends(rank, step, elements=large)
        _ends(rank, step[:came], elements=large, ends=False)
    assert [_ends(rank, step, elements=large) for rank in ranks] == [[["a"], ["b"], ["c"], ["d"], ["e"]]] * 3


def test_units_of_other_runs() -> None:
    step = [("a",), ("b",), ("c",)]
    assert _ends(Units("fused", joins=False), step) == [["a", "b", "c"]]
    half = units.UNIT_ELEMENTS["fused"] // 2
    assert _ends(Units("fused", joins=False), step, elements=half) == [["a", "b"], ["c"]]
    bare = Units("fifo", joins=False)
    assert [_ends(bare, step) for _ in range(2)] == [[["a"], ["b"], ["c"]]] * 2, "the caller may wait for each"
    resumed = Units("fifo", joins=True)
    resumed.expect(step)
    assert _ends(resumed, step) == [["a"], ["b", "c"]], "as before the run was interrupted"
    mixed = Units("fused", joins=False)
    assert _ends(mixed, step, alone={"b"}) == [["a"], ["b"], ["c"]]
    kinds = {"c": torch.float64}
    assert _ends(mixed, step, kinds=kinds) == [["a", "b"], ["c"]], "one unit has one dtype"


@pytest.mark.parametrize("policy", ["fifo", "fused"])
@pytest.mark.parametrize("name", ["powersgd:rank=2", "adaptive-rank:every=4", "powersgd-unbiased:rank=2"])
def test_joined_buckets_have_the_means_of_single_ones(name: str, policy: PolicyName) -> None:
    """Bits too: neither an element's message nor its products depend on what else is in its unit."""
    compressor = commhooks.make_compressor(name)
    parameters = zeros(*SHAPES)
    joined, single = (
        Workers(compressor, RANKS, parameters, buckets=3, policy=policy, joins_buckets=True) for _ in range(2)
    )
    _never_join(single)
    for step in range(7):
        gradients = normal(parameters, RANKS, seed=step)
        for of_joined, of_single in zip(joined.step(gradients), single.step(gradients), strict=True):
            for number, (one, other) in enumerate(zip(of_joined, of_single, strict=True)):
                torch.testing.assert_close(one, other, msg=lambda text: f"step {step}, {number}: {text}")  # noqa: B023
    totals, alone = (workers.engines[0].statistics() for workers in (joined, single))
    assert (totals.buckets, totals.steps) == (alone.buckets, alone.steps) == (21, 7)
    assert totals.payload_bytes == alone.payload_bytes
    assert totals.gradient_bytes == alone.gradient_bytes
    units_a_step = 1 if policy == "fused" else 2
    assert joined.traffic.collectives <= single.traffic.collectives
    if policy == "fifo":  # the first step has three units
        rounds = alone.collectives / 21
        assert totals.collectives == rounds * (3 + 6 * units_a_step)


@dataclasses.dataclass(frozen=True)
class Halved(PowerSGD):
    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        bucket.memory.mul_(0.5)
        yield from super().compress(bucket, context)


@dataclasses.dataclass(frozen=True)
class Told(Halved):
    def may_join_buckets(self, step: int) -> bool:
        return True


def test_a_subclass_with_an_exchange_of_its_own_gets_single_buckets() -> None:
    """It may use the bucket's memory, of which a unit has only the first bucket's."""
    halved = Halved(rank=2)
    assert not halved.may_join_buckets(0) and not ErrorFeedback(inner=halved).may_join_buckets(0)
    assert ErrorFeedback(inner=PowerSGD()).may_join_buckets(0) and Told().may_join_buckets(0)
    parameters = zeros((4,), (4,), (4,))
    workers = Workers(halved, 1, parameters, buckets=3, joins_buckets=True)
    for _ in range(3):
        for mean in workers.step([[torch.ones(4) for _ in parameters]])[0]:
            assert mean.tolist() == [0.5] * 4


@pytest.mark.parametrize("left_out", ["parameter", "rank"])
def test_an_unused_parameter_and_a_rank_without_inputs_keep_their_state_in_a_unit(left_out: str) -> None:
    parameters, powersgd = zeros(*SHAPES), commhooks.make_compressor("powersgd")
    unused = left_out == "parameter"
    workers = Workers(powersgd, RANKS, parameters, buckets=3, policy="fused", may_be_unused=unused, may_join=not unused)
    workers.step(normal(parameters, RANKS, seed=0))
    kept = workers.residual(0, 2).clone()
    gradients = normal(parameters, RANKS, seed=1)
    for zero in [own[2] for own in gradients] if unused else gradients[0]:
        zero.zero_()
    means = workers.step(gradients)
    assert torch.equal(workers.residual(0, 2), kept) and kept.count_nonzero()
    assert bool(means[0][2].count_nonzero()) != unused


def test_a_unit_that_never_ends_fails_and_the_next_step_goes_on() -> None:
    parameters = zeros((8, 8), (8, 8), (8, 8))
    workers = Workers(commhooks.make_compressor("powersgd"), 1, parameters, buckets=3, policy="fused")
    engine, memory = workers.engines[0], workers._memories[0]
    first = engine.run(GivenBucket(0, memory[0], [parameters[0]], is_last=False))
    workers.step(normal(parameters, 1, seed=0))
    with pytest.raises(commhooks.CollectiveError, match="step 0 was cut short: step 1 began before its end"):
        first.wait()
    second = engine.run(GivenBucket(0, memory[0], [parameters[0]], is_last=False))
    engine.stand_between_steps("replace")
    with pytest.raises(commhooks.CollectiveError, match="step 2 was cut short: replace came before its last bucket"):
        second.wait()
    third = engine.run(GivenBucket(0, memory[0], [parameters[0]], is_last=False))
    engine.stop()
    with pytest.raises(commhooks.CollectiveError, match="step 3: not started, because the attachment was stopped"):
        third.wait()


def test_settings_that_do_not_fit_fail_every_bucket_of_the_unit() -> None:
    parameters = zeros((8, 8), (8, 8))
    workers = Workers(commhooks.make_compressor("powersgd", skip=("other",)), 1, parameters, buckets=2, policy="fused")
    engine, memory = workers.engines[0], workers._memories[0]
    first = engine.run(GivenBucket(0, memory[0], [parameters[0]], is_last=False))
    with pytest.raises(commhooks.SettingsError, match="'other' must match a parameter's name"):
        engine.run(GivenBucket(1, memory[1], [parameters[1]], is_last=True))
    with pytest.raises(commhooks.SettingsError, match="'other' must match a parameter's name"):
        first.wait()


def _never_join(workers: Workers) -> None:
    for engine in workers.engines:
        engine._may_join_others = lambda handed: False  # type: ignore[method-assign]


def _ends(
    divided: Units,
    step: Sequence[Sequence[str]],
    elements: int = 4,
    alone: Any = frozenset(),
    kinds: Any = None,
    *,
    ends: bool = True,
) -> list[list[str]]:
    """Return the names in each unit of a step with these buckets."""
    found: list[list[Handed]] = []
    for number, names in enumerate(step):
        memory = torch.empty(elements, dtype=(kinds or {}).get(names[0], torch.float32), device="meta")
        parameters: list[Tensor] = [memory]
        slots = [Slot(memory, memory, ParameterState(name)) for name in names]
        bucket = GivenBucket(number, memory, parameters, is_last=ends and number == len(step) - 1)
        handed = Handed(bucket, BucketView(number, memory, slots), torch.futures.Future(), None)
        found += divided.add(handed, may_join=names[0] not in alone)
    divided.end_step("")
    return [[one.view.slots[0].name for one in unit] for unit in found]
