"""Where wrappers, state and requests meet: each of these once silently gave a wrong number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from commhooks import ErrorFeedback, PerParameter, StartAfter, make_compressor
from commhooks.codecs import Int8
from commhooks.compressors import AllReduceMean, PowerSGD, TopK, TwoHop
from commhooks.errors import CompressorError
from commhooks.language import AllReduce, BucketView, Compressor, Context, Entry, Exchange, Judge, Part, Place
from commhooks.language.requests import Layout
from commhooks.lockstep import average_in_lockstep
from tests.commhooks.workers import Workers, exchangers, gradients_of, normal, zeros


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums(Compressor):
    """Remember the sum of all gradients, in the parameter's own shape."""

    def state(self, place: Place) -> dict[str, Entry]:
        return {"sum": Entry(kind="private", shape=tuple(place.parameter.shape))}

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        (slot,) = bucket.slots
        own = slot.form().clone()
        (mean,) = yield AllReduce(slot.part(own), average=True, last=True)
        finite = yield Judge(mean)
        slot.commit("sum", slot.state("sum") + own.view_as(slot.state("sum")), finite)
        slot.write(slot.state("sum").reshape(-1))


@pytest.mark.parametrize(
    ("compressor", "shape"),
    [(Sums(), (4, 6)), (make_compressor("sign"), (1, 128)), (make_compressor("int4"), (1, 64))],
    ids=["private", "sign", "int4"],
)
def test_state_that_is_shaped_like_its_parameter_is_loaded(compressor: Compressor, shape: tuple[int, ...]) -> None:
    tensors = {"w": torch.zeros(shape)}
    ran, resumed = (exchangers(tensors, compressor) for _ in range(2))
    for step in range(3):
        average_in_lockstep(ran, gradients_of(tensors, step))
    for one, other in zip(ran, resumed, strict=True):
        other.load_state_dict(one.state_dict())
    ours, theirs = gradients_of(tensors, 9), gradients_of(tensors, 9)
    average_in_lockstep(ran, ours)
    average_in_lockstep(resumed, theirs)
    assert torch.equal(ours[0]["w"], theirs[0]["w"])


def test_what_is_lost_before_the_start_is_fed_back_too() -> None:
    before = TopK(ratio=0.05)
    workers = Workers(ErrorFeedback(inner=StartAfter(before=before, inner=PowerSGD(), steps=3)), 2, zeros((64,)))
    for step in range(3):
        workers.step(normal(workers.parameters, 2, seed=step))
    assert workers.residual(0, 0).count_nonzero() >= 50


@pytest.mark.parametrize("nested", ["in inner", "in before"])
def test_a_schedule_of_ranks_may_be_nested(nested: str) -> None:
    one, two, three = (PowerSGD(rank=r) for r in (1, 2, 3))
    schedule = (
        StartAfter(before=one, steps=2, inner=StartAfter(before=two, steps=4, inner=three))
        if nested == "in inner"
        else StartAfter(before=StartAfter(before=one, steps=2, inner=two), steps=4, inner=three)
    )
    workers = Workers(ErrorFeedback(inner=schedule), 2, zeros((24, 40)))
    for step, rank in enumerate((1, 1, 2, 2, 3, 3)):
        before = workers.traffic.payload_elements
        workers.step(normal(workers.parameters, 2, seed=step))
        assert workers.traffic.payload_elements - before == rank * (24 + 40)


@pytest.mark.parametrize("policy", ["fifo", "fused"])
@pytest.mark.parametrize("plain", [AllReduceMean(), make_compressor("bf16")], ids=["all-reduce", "bf16"])
def test_an_inf_in_a_plain_rule_is_the_other_rules_too(policy: str, plain: Compressor) -> None:
    rules = PerParameter(rules=(("*.bias", plain),), otherwise=make_compressor("powersgd"))
    workers = Workers(rules, 2, zeros((24, 40), (24,)), ["a.weight", "a.bias"], policy=policy)
    workers.step(normal(workers.parameters, 2, seed=0))
    before = {name: kept.clone() for name, kept in workers.states[0].of(workers.parameters[0]).tensors.items()}
    spoiled = normal(workers.parameters, 2, seed=1)
    spoiled[1][1][3] = float("inf")
    workers.step(spoiled)
    after = workers.states[0].of(workers.parameters[0]).tensors
    assert all(torch.equal(after[name], kept) for name, kept in before.items())


def test_a_compressor_may_be_put_back_after_another() -> None:
    narrow, wide = make_compressor("powersgd", rank=1), make_compressor("powersgd", rank=2)
    workers = Workers(narrow, 2, zeros((24, 40)))
    for compressor in (wide, narrow, wide):
        workers.step(normal(workers.parameters, 2, seed=0))
        for engine in workers.engines:
            engine.replace(compressor, torch.device("cpu"))
    workers.step(normal(workers.parameters, 2, seed=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turned(Compressor):
    """Average a matrix through a transposed view of it."""

    in_place: bool

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        (slot,) = bucket.slots
        M = slot.gradient.view(3, 4)
        halves = Layout(("a", "b"), (6, 6))
        parts = [Part(M.t(), halves, in_place=self.in_place), Part(torch.ones(2), Layout(("c",), (2,)))]
        answer, ones = yield AllReduce(*parts, average=True, last=True)
        assert torch.equal(ones, torch.ones(2))
        slot.write(answer.t().reshape(-1))


@pytest.mark.parametrize("policy", ["fifo", "fused"])
@pytest.mark.parametrize("in_place", [False, True])
def test_parts_need_not_be_contiguous(policy: str, in_place: bool) -> None:
    workers = Workers(Turned(in_place=in_place), 2, zeros((12,), dtype=torch.float64), policy=policy)
    gradients = normal(workers.parameters, 2, seed=0)
    means = workers.step(gradients)
    assert torch.allclose(means[0][0], (gradients[0][0] + gradients[1][0]) / 2, rtol=0, atol=1e-15)


def test_one_tensor_under_two_names_is_two() -> None:
    tensor = torch.zeros(64)
    both = exchangers({"a": tensor, "b": tensor}, make_compressor("top-k", ratio=0.1))
    own = [{"a": torch.full((64,), 1.0), "b": torch.full((64,), -1.0)} for _ in range(2)]
    average_in_lockstep(both, own)
    state = both[0].state_dict()["local"]["rank0"]
    assert not torch.equal(state["a"]["residual"], state["b"]["residual"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(Sums):
    """Its settings are equal by hash, and cannot be compared."""

    table: numpy.ndarray[Any, Any] = dataclasses.field(hash=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tabled(Int8):
    """A codec of that kind."""

    table: numpy.ndarray[Any, Any] = dataclasses.field(hash=False)


@pytest.mark.parametrize(
    "make", [lambda own: Scaled(table=own), lambda own: TwoHop(codec=Tabled(table=own))], ids=["compressor", "codec"]
)
def test_settings_that_cannot_be_compared_break_no_other_compressor(make: Callable[[Any], Compressor]) -> None:
    tensors = {"w": torch.zeros(64)}
    for kept in [exchangers(tensors, make(numpy.arange(3) + own)) for own in range(3)]:
        average_in_lockstep(kept, gradients_of(tensors, 0))


def test_state_of_a_channels_last_tensor_is_saved_in_its_order() -> None:
    tensor = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    last, plain = exchangers({"w": tensor}, "top-k"), exchangers({"w": torch.zeros(2, 3, 4, 5)}, "top-k")
    average_in_lockstep(last, gradients_of({"w": tensor}, 0))
    average_in_lockstep(plain, gradients_of({"w": tensor}, 0))
    saved = [of[0].state_dict()["local"]["rank0"]["w"]["residual"] for of in (last, plain)]
    assert torch.equal(*saved)


def test_after_a_failure_workers_of_one_process_raise_every_time() -> None:
    (one,) = exchangers({"w": torch.zeros(3)}, Sums(), world_size=1)
    spoiled: Any = {"w": torch.zeros(3)}
    one.engine.connection._channels.turn = _fail  # type: ignore[attr-defined]  # breaks it on purpose
    for _ in range(3):
        with pytest.raises(CompressorError):
            one.average(spoiled)


def _fail() -> bool:
    raise RuntimeError("broken")


def test_average_says_where_workers_of_one_process_meet() -> None:
    one, _ = exchangers({"w": torch.zeros(3)}, "all-reduce")
    with pytest.raises(CompressorError, match="meet in average_in_lockstep"):
        one.average({"w": torch.ones(3)})
