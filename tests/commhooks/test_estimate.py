"""Estimates: costs from samples, payloads counted alone, and steps by arithmetic."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import commhooks
from commhooks.errors import SettingsError
from experiments import predicting
from experiments.predicting.candidates import DENSE
from experiments.predicting.costs import FILE, Costs, HookCosts, Sample, copy_seconds
from experiments.predicting.estimates import FASTER
from experiments.predicting.link import Link, Transfer
from experiments.predicting.paying import Case, paying_rates
from experiments.predicting.payloads import rounds_of
from experiments.predicting.predicting import Unlinked
from experiments.predicting.sizes import FORWARD_SHARE, in_buckets, ready_moments, square_matrices
from experiments.predicting.step_time import Bucket, Stage, Step, step_time
from tests.costs_then import AS_THEN
from tests.tiers import A_ROW

NS = 1e-9


def costs_of(compressor: str, *, a_matrix: float = 0.0, bucket: float = 0.0, growth: float = 0.0) -> HookCosts:
    """Return made-up costs of a hook of one round: per element before it, and half as much after it."""
    samples = [Sample(size, (a_matrix * size, a_matrix * size / 2)) for size in (100, 10_000)]
    return HookCosts(
        compressor=compressor,
        bucket_seconds=bucket,
        matrices=tuple(samples),
        vector=Sample(10, (40.0, 20.0)),
        copies_per_byte=0.0,
        growth=(0.0, growth),
    )


MADE_UP = Costs(
    hooks={
        DENSE: costs_of("AllReduceMean()"),
        "fp16": costs_of("Cast(dtype=torch.float16)", a_matrix=2.0),
        "top-k:ratio=0.01": costs_of("TopK()", a_matrix=30.0),
    },
    hop_seconds=0.0,
    round_seconds=0.0,
    copy_rate=4e9,
    machine={},
    versions={},
)


def made_up(rate: float = 1e9, **settings: float | str) -> predicting.Estimate:
    return predicting.estimate(1e6, **{"compute": 0.3, "ranks": 2, **settings}, rate=rate, copy_rate=4e9, costs=MADE_UP)  # type: ignore[arg-type]  # 'incompatible type "**dict[str, float | str]"'


def test_a_dense_step_is_compute_then_what_is_left_of_the_link() -> None:
    """One bucket of 4 MB, ready when the backward pass ends; a ring of two ranks sends it once."""
    link = Link(rate=1e9, latency=0.0)
    on_link = link.transfer("all-reduce", 4_000_000, 2).seconds
    assert made_up(latency=0.0, optimizer=0.01).of(DENSE).time.seconds == pytest.approx(0.3 + on_link + 0.01)


def test_a_compressed_step_adds_copies_and_sends_fewer_bytes() -> None:
    """2 copies of each element before the round and 1 after it, at 1 ns a copy of an element: 2 and 1 ms."""
    on_link = Link(rate=1e9).transfer("all-reduce", 2_000_000, 2).seconds
    fp16 = made_up(latency=0.0).of("fp16").time
    assert fp16.seconds == pytest.approx(0.3 + 2e-3 + on_link + 1e-3)
    assert fp16.compression == pytest.approx(3e-3)
    assert fp16.bytes_sent == 2_000_000


def test_a_model_known_by_its_size_has_as_many_parameters_as_stated() -> None:
    assert predicting.estimate(25e6, compute=0.2, ranks=2, rate=1e9, hooks=[], copy_rate=1e10).parameters == 25_000_000


def test_a_step_of_a_thousand_buckets_asks_the_link_once_for_each_size() -> None:
    asked: list[int] = []

    class Counting:
        def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
            asked.append(payload)
            return Transfer(1e-3, 1e-4, payload)

    buckets = tuple(Bucket(1.0, (Stage(0.0, (("all-reduce", 4 + place % 2),)),)) for place in range(1000))
    time = step_time(Step(compute=1.0, buckets=buckets), Counting(), 2)
    assert time.bytes_sent == 4500
    assert asked == [4, 5]


def test_at_the_break_even_rate_both_steps_take_equally_long() -> None:
    rate = made_up().of("top-k:ratio=0.01").break_even
    assert 0 < rate < math.inf
    there = made_up(rate)
    assert there.of("top-k:ratio=0.01").time.seconds == pytest.approx(there.of(DENSE).time.seconds, rel=1e-3)
    assert made_up(0.9 * rate).of("top-k:ratio=0.01").pays
    assert not made_up(1.1 * rate).of("top-k:ratio=0.01").pays


@A_ROW
@pytest.mark.parametrize("hook", MADE_UP.hooks)
def test_a_faster_link_never_makes_a_step_slower(hook: str) -> None:
    seconds = [made_up(rate).of(hook).time.seconds for rate in (1e7, 1e8, 1e9, 1e10, math.inf)]
    assert seconds == sorted(seconds, reverse=True)


def test_what_only_costs_never_pays_and_what_only_saves_always_does() -> None:
    def step(seconds: float, payload: int) -> Case:
        stage = Stage(seconds, (("all-reduce", payload),))
        step = Step(compute=0.1, buckets=(Bucket(0.1, (stage,)),))
        return Case(Unlinked(step, 2), Link(rate=1e9, seconds_per_byte=NS))

    assert paying_rates(step(0.0, 1_000_000), step(0.001, 1_000_000)) == ()
    assert paying_rates(step(0.0, 1_000_000), step(0.0, 500_000)) == ((0.0, math.inf),)


def a_case(seconds: float, *collectives: tuple[str, int], latency: float = 0.0, ranks: int = 2) -> Case:
    """Return a step of one bucket, ready at the end of 100 ms, over a ring without headers."""
    step = Step(compute=0.1, buckets=(Bucket(0.1, (Stage(seconds, collectives),)),))
    return Case(Unlinked(step, ranks), Link(rate=1e9, latency=latency, algorithm="ring"))


def test_what_saves_messages_and_sends_more_bytes_pays_above_a_rate() -> None:
    """An all-gather of 16 ranks waits for 15 messages, an all-reduce for 30: 15 latencies against the bytes."""
    dense = a_case(0.0, ("all-reduce", 1_000_000), latency=1e-3, ranks=16)
    other = a_case(0.0, ("all-gather", 500_000), latency=1e-3, ranks=16)
    more_bits = 8 * (15 * 500_000 - 2 * 15 / 16 * 1_000_000)
    ((low, high),) = paying_rates(dense, other)
    assert low == pytest.approx(more_bits / 15e-3, rel=1e-3)
    assert high == math.inf


def test_what_saves_messages_and_computes_pays_between_no_rates_or_above_one() -> None:
    """With 10 ms of compression the 15 ms saved leave 5; with 20 ms nothing is left."""
    dense = a_case(0.0, ("all-reduce", 1_000_000), latency=1e-3, ranks=16)
    more_bits = 8 * (15 * 500_000 - 2 * 15 / 16 * 1_000_000)
    ((low, high),) = paying_rates(dense, a_case(0.010, ("all-gather", 500_000), latency=1e-3, ranks=16))
    assert low == pytest.approx(more_bits / 5e-3, rel=1e-3) and high == math.inf
    assert paying_rates(dense, a_case(0.020, ("all-gather", 500_000), latency=1e-3, ranks=16)) == ()


def test_two_limits_are_both_said() -> None:
    """A processor that sends a byte in 10 ns makes fast links alike: then the fewer bytes of dense do not count."""
    dense = a_case(0.0, ("all-reduce", 1_000_000), latency=1e-3, ranks=16)
    slow = dataclasses.replace(dense.link, seconds_per_byte=10e-9)
    other = Case(a_case(0.0, ("all-gather", 500_000), ranks=16).step, dataclasses.replace(slow, latency=1e-3))
    found = paying_rates(dense, other)  # 75 ms of processor time: dense is faster once more
    assert found == ()
    slower = dataclasses.replace(other, link=dataclasses.replace(other.link, seconds_per_byte=2.2e-9))
    ((low, high),) = paying_rates(dense, slower)
    assert low == pytest.approx(8 * 5_625_000 / 15e-3, rel=1e-3)
    # Then the gather's 7.5 MB take 16.5 ms on any link, and all but 1.5 ms of it are what it saves in messages.
    assert high == pytest.approx(8 * 1_875_000 / 1.5e-3, rel=1e-3)


@pytest.mark.parametrize("rate", [1e7, math.inf])
def test_what_is_said_of_this_rate_agrees_with_the_ranges(rate: float) -> None:
    found = predicting.estimate(
        1e6, compute=0.05, ranks=16, rate=rate, latency=0.05, hooks=["top-k:ratio=0.1"], copy_rate=14e9, costs=AS_THEN
    )
    for one in found.hooks:
        assert one.pays == any(low <= rate <= high for low, high in one.pays_between)
    gathering = found.of("top-k:ratio=0.1")
    assert math.isnan(gathering.break_even), "it pays above a rate: no rate is the one below which it does"
    ((low, high),) = gathering.pays_between
    assert 0 < low < 1e7 and high == math.inf


@pytest.mark.parametrize("hook", ["int8", "sign", "natural"])
def test_a_number_of_parameters_is_padded_once_a_bucket_as_a_model_is(hook: str) -> None:
    """64 ranks and matrices of 1,024 elements: each matrix alone would be padded to a block for each rank."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(100)))
    usual: dict[str, Any] = {"compute": 0.1, "ranks": 64, "rate": 1e8, "hooks": [hook], "copy_rate": 14e9}
    counted = predicting.estimate(102_400, matrix=1024, **usual).of(hook).time.bytes_sent
    of_model = predicting.estimate(model, **usual).of(hook).time.bytes_sent
    assert counted == pytest.approx(of_model, rel=0.1)  # which rank serves a block depends on the names of parameters
    assert counted < 102_400 * 4 * 2


def test_a_step_that_is_slower_on_a_faster_link_is_known_to_be() -> None:
    found = predicting.estimate(
        25e6, compute=0.2, ranks=16, rate=1e9, hooks=["top-k:ratio=0.1"], copy_rate=14e9, costs=AS_THEN
    )
    slower = found.of("top-k:ratio=0.1")
    assert slower.on_faster_link > 1.03 * slower.time.seconds
    there = predicting.estimate(
        25e6, compute=0.2, ranks=16, rate=FASTER * 1e9, hooks=["top-k:ratio=0.1"], copy_rate=14e9, costs=AS_THEN
    )
    assert there.of("top-k:ratio=0.1").time.seconds == pytest.approx(slower.on_faster_link)


def test_without_a_backend_neither_bytes_nor_messages_nor_rounds_take_processor_time() -> None:
    gloo = dataclasses.replace(
        MADE_UP,
        hop_seconds=0.001,
        round_seconds=0.002,
        hooks={DENSE: dataclasses.replace(MADE_UP.hooks[DENSE], copies_per_byte=10.0)},
    )
    usual: dict[str, Any] = {"compute": 0.3, "ranks": 2, "rate": math.inf, "latency": 0.0, "copy_rate": 4e9}
    without = predicting.estimate(1e6, **usual, costs=gloo, backend="none").of(DENSE).time
    assert without.seconds == pytest.approx(0.3)
    # 4 MB at 10 copies of a byte of 0.25 ns, two messages that wait, and a round
    counted = predicting.estimate(1e6, **usual, costs=gloo).of(DENSE).time
    assert counted.seconds == pytest.approx(0.3 + 4e6 * 10 * 0.25e-9 + 2 * 0.001 + 0.002)
    with pytest.raises(SettingsError, match="backend 'nccl' is not known: expected one of gloo, none"):
        predicting.estimate(1e6, **usual, costs=gloo, backend="nccl")


def test_the_safest_gain_is_the_fastest_that_pays_and_lost_nothing_on_any_task() -> None:
    found = predicting.estimate(
        25e6,
        compute=0.2,
        ranks=4,
        rate=1e9,
        hooks=["powersgd:rank=2", "top-k:ratio=0.01", "fp16"],
        copy_rate=14e9,
    )
    assert found.best.hook == "powersgd:rank=2" and found.best.losses == (), "it was not measured: no zeros"
    assert found.of("top-k:ratio=0.01").time.seconds < found.of("fp16").time.seconds
    losses = {loss.task: loss for loss in found.of("top-k:ratio=0.01").losses}
    on_gpt = losses["gpt"].difference.mean
    assert on_gpt is not None and on_gpt > 0.5 and not losses["gpt"].is_safe
    safest = found.safest
    assert safest is not None and safest.hook == "fp16" and safest.pays
    assert {task for task, _ in found.tasks} == losses.keys() == {"digits", "gpt"}
    nothing = predicting.estimate(25e6, compute=0.2, ranks=4, rate=1e9, hooks=["top-k:ratio=0.01"], copy_rate=14e9)
    assert nothing.best.pays and nothing.safest is None


def test_the_fastest_comes_first_and_dense_is_the_baseline() -> None:
    found = made_up()
    assert [one.time.seconds for one in found.hooks] == sorted(one.time.seconds for one in found.hooks)
    assert found.of(DENSE).speed_up == 1
    assert math.isnan(found.of(DENSE).break_even)
    assert found.best.speed_up == found.of(DENSE).time.seconds / found.best.time.seconds


def test_a_cost_is_interpolated_between_matrices_and_proportional_beyond_the_largest() -> None:
    costs = costs_of("", a_matrix=2.0)
    costs = dataclasses.replace(costs, matrices=(Sample(100, (500.0, 0.0)), Sample(300, (900.0, 0.0))))

    def copies(*shape: int) -> float:
        return costs.seconds([shape], 2, 1.0, 1)[0]

    assert copies(20, 10) == pytest.approx(700)  # half-way
    assert copies(30, 20) == pytest.approx(1800)
    assert copies(5, 10) == pytest.approx(400)  # the line between the first two goes on
    assert copies(10) == pytest.approx(40)  # a vector
    assert costs.seconds([(20, 10)] * 3 + [(10,)], 2, 1.0, 1)[0] == pytest.approx(3 * 700 + 40)


def test_each_bucket_costs_and_each_rank_beyond_two() -> None:
    costs = costs_of("", a_matrix=1.0, bucket=0.2, growth=0.25)
    assert costs.seconds([(100, 100)], 2, NS, 1) == pytest.approx((0.1 + 1e-5, 0.1 + 0.5e-5))
    assert costs.seconds([(100, 100)], 6, NS, 1) == pytest.approx((0.1 + 1e-5, 0.1 + 2 * 0.5e-5))


def test_a_bucket_of_fewer_rounds_has_the_cost_of_the_others_after_its_last() -> None:
    costs = dataclasses.replace(
        costs_of(""),
        matrices=(Sample(1, (1.0, 2.0, 4.0)), Sample(2, (1.0, 2.0, 4.0))),
        vector=Sample(1, (1.0, 2.0, 4.0)),
        growth=(0.0, 0.0, 0.0),
    )
    assert costs.seconds([(1, 1)], 2, 1.0, 1) == (1.0, 6.0)
    assert costs.seconds([(1, 1)], 2, 1.0, 0) == (7.0,)
    assert costs.seconds([(1, 1)], 2, 1.0, 3) == (1.0, 2.0, 4.0, 0.0)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("all-reduce", {}, ((("all-reduce", 4 * 4096),),)),
        ("fp16", {}, ((("all-reduce", 2 * 4096),),)),
        ("powersgd", {"rank": 2}, ((("all-reduce", 4 * 2 * 64),), (("all-reduce", 4 * 2 * 64),))),
    ],
)
def test_payloads_are_counted_without_other_ranks(
    name: str, settings: dict[str, Any], expected: tuple[object, ...]
) -> None:
    gradients = {"weight": torch.randn(64, 64)}
    assert rounds_of(commhooks.make_compressor(name, **settings), gradients, 8) == expected


def test_parameters_lie_in_buckets_from_the_last_one_on() -> None:
    shapes = [(1024, 1024)] * 9  # of 4 MiB
    assert in_buckets(shapes) == [(8,), (7, 6, 5, 4, 3, 2, 1), (0,)]
    assert in_buckets(shapes, 12) == [(8, 7, 6), (5, 4, 3), (2, 1, 0)]


def test_a_size_is_taken_to_be_equal_square_matrices() -> None:
    assert square_matrices(4 * 2**20, 2**20) == [(1024, 1024)] * 4
    assert square_matrices(100, 2**20) == [(10, 10)]


def test_buckets_are_ready_in_proportion_during_the_backward_pass() -> None:
    assert ready_moments([1, 3], 0.9) == pytest.approx([0.45, 0.9])
    assert pytest.approx(1 / 3) == FORWARD_SHARE


def test_a_models_shapes_are_used_and_frozen_parameters_are_not() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    model[1].requires_grad_(False)
    found = predicting.estimate(model, compute=0.1, ranks=2, rate=1e9, copy_rate=4e9, costs=MADE_UP)
    assert (found.parameters, found.buckets) == (36, 1)
    model.requires_grad_(False)
    with pytest.raises(SettingsError, match="no parameter that requires a gradient"):
        predicting.estimate(model, compute=0.1, ranks=2, rate=1e9, copy_rate=4e9, costs=MADE_UP)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compute": 0.0}, "compute must be above zero"),
        ({"optimizer": -1.0}, r"optimizer must be in \[0, inf\)"),
        ({"ranks": 1}, "ranks must be at least 2"),
        ({"ranks": 1_000_000}, "ranks must be at most 4,096"),
        ({"copy_rate": math.inf}, "copy_rate must be above zero and finite"),
        ({"parameters": 0}, "parameters must be a finite number of at least 1"),
        ({"hooks": ["topk"]}, "Did you mean .top-k"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, object], message: str) -> None:
    usual = {"parameters": 1e6, "compute": 0.1, "ranks": 2, "rate": 1e9, "copy_rate": 4e9, "costs": MADE_UP}
    with pytest.raises(SettingsError, match=message):
        predicting.estimate(**{**usual, **settings})  # type: ignore[arg-type]  # 'incompatible type "**dict[str, object]"'


def test_the_costs_of_the_package_are_of_compressors_that_can_be_made() -> None:
    costs = Costs.read()
    assert DENSE in costs.hooks
    for one in costs.hooks.values():
        assert str(commhooks.make_compressor(one.compressor)) == one.compressor
        assert one.bucket_seconds >= 0
        assert all(cost >= 0 for sample in (*one.matrices, one.vector) for cost in sample.rounds)


def test_costs_survive_their_file_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    MADE_UP.write(path)
    assert Costs.read(path) == MADE_UP
    assert [each.name for each in tmp_path.iterdir()] == ["costs.json"]
    raw = json.loads(path.read_text())
    raw["hooks"]["fp16"]["vector"]["rounds"].pop()
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"expected a file of format 1 .* must have 2 costs"):
        Costs.read(path)
    with pytest.raises(ValueError, match="FileNotFoundError"):
        Costs.read(tmp_path / "none.json")


def test_a_copy_takes_time_and_the_file_lies_in_the_package() -> None:
    assert 0 < copy_seconds() < 1e-6  # even 4 MB/s would be faster
    assert FILE.parent == Path(predicting.__file__).parent
