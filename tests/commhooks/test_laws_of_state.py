"""What holds for the state of every compressor, of every kind, where a step or a run is not like the others.

The table's rows, and one with private and replicated state, through real engines on workers of one process.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import ErrorFeedback
from commhooks.language import AllReduce, BucketView, Compressor, Context, Entry, Exchange, Judge, Loss, Place
from commhooks.language.entries import Kind
from commhooks.lockstep import average_in_lockstep
from commhooks.wrappers.phases import phases_of
from tests import bounds
from tests.cases import CASES, FORMS, Case, is_form
from tests.commhooks.workers import Workers, exchangers, gradients_of, largest, normal, zeros
from tests.tiers import in_turn, rows, thorough


@dataclasses.dataclass(frozen=True, kw_only=True)
class Momentum(Compressor):
    """Send half of what is formed of gradient and residual; keep state of every kind but a share."""

    def state(self, place: Place) -> dict[str, Entry]:
        return {
            "momentum": Entry(kind="private"),
            "squares": Entry(kind="private", units=2),
            "steps": Entry(kind="replicated", shape=(1,), init=torch.ones_like),
        }

    def loss(self, name: str, parameter: Tensor) -> Loss:
        return Loss(0.25)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        sent, momenta = [], []
        for slot in bucket.slots:
            M = slot.form()
            momenta.append(slot.state("momentum").to(M) * 0.5 + M)
            sent.append(M / 2)
        parts = [slot.part(own) for slot, own in zip(bucket.slots, sent, strict=True)]
        means = yield AllReduce(*parts, average=True, last=True)
        finite = yield Judge(*means)
        for slot, own, momentum, mean in zip(bucket.slots, sent, momenta, means, strict=True):
            slot.keep(slot.form() - own, finite)
            slot.commit("momentum", momentum, finite)
            slot.commit("squares", slot.state("squares").to(own) + own * own, finite)
            slot.commit("steps", slot.state("steps") + 1, finite)
            slot.write(mean)


SHAPES = ((24, 40), (40,), (12, 8, 3), (7,))
OF_EVERY_KIND = Case(
    name="momentum", make=lambda: ErrorFeedback(inner=Momentum()), bytes_on_wire=lambda *_: 0, error_feedback=True,
    exact_rank=0, roundings=4,
)  # fmt: skip
REMEMBERING = [case for case in [*CASES, OF_EVERY_KIND] if phases_of(case.make())[0].is_guarded]
OWN: tuple[Kind, ...] = ("residual", "private", "share")

OF_STATE = {
    *FORMS, "sparse-loco", "svd-2", "demo", "random-k", "affine", "hierarchical-1", "two-hop-int8", "momentum",
    "top-k-beside-powersgd",
}  # fmt: skip
"""One row for each way to keep state."""


def of_state(cases: Sequence[Case]) -> list[Any]:
    """Return parameters for a test: rows of `OF_STATE`, of which `make test-fast` has some; in long runs all others."""
    fast = OF_STATE - set(FORMS) | {"powersgd-2", "top-k", "two-hop-sign"}
    usual = rows([case for case in cases if case.name in OF_STATE], unless=lambda case: case.name in fast)
    return [*usual, *thorough(case for case in cases if case.name not in OF_STATE)]


def spread(values: list[str]) -> list[Any]:
    """Return pairs for a test: rows of `OF_STATE`, which take turns with the values; in long runs all pairs."""
    usual = [case for case in REMEMBERING if case.name in OF_STATE]
    others = itertools.product([case for case in REMEMBERING if case not in usual], values)
    return [*in_turn(usual, values, fast=is_form), *thorough(others)]


every_remembering_case = pytest.mark.parametrize("case", of_state(REMEMBERING), ids=str)


def trained(
    case: Case, world_size: int = 3, steps: int = 3, dtype: torch.dtype = torch.float32, **settings: Any
) -> Workers:
    workers = Workers(case.make(), world_size, zeros(*SHAPES, dtype=dtype), buckets=2, **settings)
    for step in range(steps):
        workers.step(normal(workers.parameters, world_size, seed=step))
    return workers


def state_of(workers: Workers, *kinds: Kind) -> list[list[Tensor]]:
    """Return a copy of every rank's state, of some kinds or all."""
    every: tuple[Kind, ...] = kinds or ("replicated", *OWN)
    return [
        [kept.clone() for state in table.states() for kept in state.of_kind(*every).values()]
        for table in workers.states
    ]


def assert_equal(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


@pytest.mark.parametrize(("case", "policy"), spread(["fifo", "fused"]), ids=str)
def test_an_atomic_step_that_is_spoiled_changes_no_state(case: Case, policy: str) -> None:
    workers = trained(case, policy=policy, atomic=True)
    before = state_of(workers)
    spoiled = normal(workers.parameters, 3, seed=50)
    spoiled[1][2].view(-1)[3] = float("inf")
    workers.step(spoiled)
    assert_equal(state_of(workers), before)
    assert any(len(own) for own in before) or not case.error_feedback
    workers.step(normal(workers.parameters, 3, seed=51))
    assert all(torch.isfinite(kept).all() for own in state_of(workers) for kept in own)


@every_remembering_case
def test_atomic_steps_are_those_of_a_run_that_is_not(case: Case) -> None:
    assert_equal(state_of(trained(case, atomic=True)), state_of(trained(case)))


@every_remembering_case
def test_a_joined_rank_keeps_what_is_its_own_and_the_others_go_on(case: Case) -> None:
    """Zeros outside of a backward pass are handed in for a rank that has run out of inputs."""
    workers = trained(case)
    before = state_of(workers, "residual", "private")
    unsent = [workers.unsent(index) for index in range(len(SHAPES))]
    for index in range(len(SHAPES)):  # a residual fades where it is added to a gradient
        faded = sum(workers.residual(rank, index).double() for rank in (1, 2)) / 3
        unsent[index] -= (1 - case.decay) * faded
    gradients = normal(workers.parameters, 3, seed=50)
    gradients[0] = [torch.zeros_like(gradient) for gradient in gradients[0]]
    means = workers.step(gradients)
    after = state_of(workers, "residual", "private")
    assert all(torch.equal(a, b) for a, b in zip(after[0], before[0], strict=True))
    assert not before[1] or any(not torch.equal(a, b) for a, b in zip(after[1], before[1], strict=True))
    for own in means[1:]:
        assert all(torch.equal(a, b) for a, b in zip(own, means[0], strict=True))
    for index in range(len(SHAPES)) if case.error_feedback and not case.owes_as else ():
        whole = sum(own[index].double() for own in gradients) / 3 + unsent[index]
        sent = torch.stack([workers.residual(rank, index).double() for rank in range(3)])
        allowed = loss_of_a_step(case, [own[index] for own in gradients], sent)
        assert largest(means[0][index] + workers.unsent(index) - whole) <= allowed


# Where a whole bucket is one matrix, the residual belongs to all of it, and nothing in it is unused.
@pytest.mark.parametrize("case", of_state([case for case in REMEMBERING if not case.depends_on_buckets]), ids=str)
def test_what_no_rank_used_keeps_its_state_and_has_no_mean(case: Case) -> None:
    workers = trained(case, may_be_unused=True)
    unused = workers.parameters[0]
    before = [{name: kept.clone() for name, kept in table.of(unused).tensors.items()} for table in workers.states]
    gradients = normal(workers.parameters, 3, seed=50)
    for own in gradients:
        own[0].zero_()
    gradients[0][1].zero_()  # unused on one rank only, so it is as usual
    for mean in workers.step(gradients):
        assert not mean[0].any()
        assert mean[1].any()
    for table, kept in zip(workers.states, before, strict=True):
        assert all(torch.equal(table.of(unused).tensors[name], own) for name, own in kept.items())


# A narrow wire rounds numbers of another size otherwise.
@pytest.mark.parametrize("case", of_state([case for case in REMEMBERING if case.wire is None]), ids=str)
def test_state_follows_the_loss_scale(case: Case) -> None:
    """A power of two changes no digit, so the scaled run's means are the other's, times the scale if they follow it."""
    plain, scaled = trained(case), trained(case)
    for engine in scaled.engines:
        engine.loss_scale.announce(1024.0)
    for step in range(50, 53):
        gradients = normal(plain.parameters, 3, seed=step)
        larger = [[gradient * 1024 for gradient in own] for own in gradients]
        for ours, theirs in zip(scaled.step(larger)[0], plain.step(gradients)[0], strict=True):
            assert torch.equal(ours, theirs * (1024 if case.follows_scale else 1))


@pytest.mark.parametrize(("case", "storage"), spread(["bf16", "host"]), ids=str)
def test_own_state_is_stored_as_asked(case: Case, storage: str) -> None:
    """Stored in bf16 a residual is rounded once a step; in the host's memory, which here is all memory, not at all.

    Unasked it is fp32, of narrower gradients too.
    """
    dtype = torch.bfloat16 if storage == "host" else torch.float32
    stored = trained(case, storage=storage, dtype=dtype)
    for table in stored.states:
        dtypes = {kept.dtype for state in table.states() for kept in state.of_kind(*OWN).values()}
        assert dtypes <= {torch.bfloat16 if storage == "bf16" else torch.float32}
    if storage == "host":
        assert_equal(state_of(stored), state_of(trained(case, dtype=dtype)))
    means = stored.step(normal(stored.parameters, 3, seed=50))
    assert all(torch.isfinite(mean).all() for own in means for mean in own)


@every_remembering_case
def test_an_entry_with_one_element_more_or_a_nan_is_refused_by_name_and_nothing_is_loaded(case: Case) -> None:
    tensors = {f"layer{number}": tensor for number, tensor in enumerate(zeros(*SHAPES))}
    ran = exchangers(tensors, case.make())
    for step in range(3):
        average_in_lockstep(ran, gradients_of(tensors, step))
    state, edits = ran[0].state_dict(), 0
    before, held = str(state), [state["replicated"], state["local"]["rank0"]]
    for part in held:
        for name, kept in part.items():
            declared = case.make().state(Place(name, tensors[name], 2))
            for entry, tensor in kept.items():
                spoiled = torch.full(tensor.shape, math.nan)
                longer = torch.cat([tensor.flatten(), tensor.new_zeros(1)])
                for wrong in (longer, spoiled) if entry in declared else (spoiled,):  # a whole bucket has any size
                    kept[entry] = wrong
                    if wrong.numel():
                        edits += 1
                        with pytest.raises(commhooks.CheckpointError, match=f"'{name}'.*'?{entry}"):
                            ran[0].load_state_dict(state)
                kept[entry] = tensor
    assert edits >= sum(tensor.numel() > 0 for part in held for kept in part.values() for tensor in kept.values())
    assert str(ran[0].state_dict()) == before


def loss_of_a_step(case: Case, gradients: list[Tensor], residuals: Tensor) -> float:
    """Return how much of what was to be sent a step may round away; residuals are those after it."""
    to_send = [g.double().abs() + 2 * r.abs() for g, r in zip(gradients, residuals, strict=True)]
    largest_norm = [torch.full((1,), max(float(own.norm()) for own in to_send) * len(SHAPES)) for _ in to_send]
    limits = case.rank, torch.float32, case.wire, case.roundings
    return bounds.of_conservation(largest_norm, *limits)
