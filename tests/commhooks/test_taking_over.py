"""One compressor takes over from another, by a schedule or by `replace`: what the first owes is sent by the second."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import Hierarchical, PerParameter, make_compressor
from commhooks.compressors import AllReduceMean, TwoHop
from commhooks.compressors.codecs import Sign
from commhooks.language import Compressor, Place
from commhooks.language.entries import blocks_served
from commhooks.lockstep import average_in_lockstep
from commhooks.wrappers.start_after import schedule
from tests import bounds
from tests.commhooks.resuming import roundtrip
from tests.commhooks.workers import Workers, exchangers, gradients_of, largest, mean_of, normal, zeros
from tests.tiers import covering

SHAPES = ((9, 10), (5, 7), (6,), (40,))
"""Of 8 elements 11 blocks and a rest of 2; 4 and 3; a rest alone; 5 blocks. Of 16: 5 and 10; 2 and 3; 6; 2 and 8."""
STEPS = 9
CPU = torch.device("cpu")

Phases = Sequence[tuple[int, Compressor]]


def sign(block: int = 8) -> Compressor:
    return make_compressor("sign", block=block)


def int8(block: int = 16) -> Compressor:
    return make_compressor("int8", block=block)


def machines(inner: Compressor, size: int = 2) -> Compressor:
    return Hierarchical(inner=inner, size=size)


def by_layer(first: Compressor, otherwise: Compressor) -> Compressor:
    return PerParameter(rules=(("layer0", first),), otherwise=otherwise)


PHASES: dict[str, Phases] = {
    "larger blocks": ((0, sign()), (4, int8())),
    "smaller blocks": ((0, int8()), (4, sign())),
    "top-k": ((0, sign()), (4, make_compressor("top-k", ratio=0.2))),
    "dgc": ((0, sign()), (4, make_compressor("dgc", ratio=0.2, momentum=0.0))),
    "and back": ((0, sign()), (3, int8()), (6, sign())),
    "machines": ((0, machines(sign())), (4, machines(int8()))),
    "machines, then ranks": ((0, machines(sign())), (4, int8())),
    "larger machines, then smaller, then ranks": ((0, machines(sign(), 4)), (3, machines(int8())), (6, sign(24))),
    "by parameter": ((0, by_layer(sign(), sign(24))), (4, by_layer(int8(), make_compressor("top-k", ratio=0.2)))),
}
"""Each of them for 4 ranks; the last compressor keeps a residual for whatever has a block."""

WAYS = ["schedule", "replace"]
every_way = pytest.mark.parametrize("how", WAYS)
every_way_and_policy = pytest.mark.parametrize(
    ("how", "policy"),
    [
        ("schedule", "fifo"),
        ("replace", "fused"),
        pytest.param("schedule", "fused", marks=pytest.mark.soak),
        pytest.param("replace", "fifo", marks=pytest.mark.soak),
    ],
)
"""Each way and each policy occurs; the long runs have all pairs."""


class Run:
    """Workers through some steps, whose compressor is scheduled or replaced; it counts what the means fall short of."""

    def __init__(self, phases: Phases, how: str, world_size: int = 4, **settings: Any) -> None:
        dtype = settings.pop("dtype", torch.float64)
        self._to_come = dict(phases[1:]) if how == "replace" else {}
        compressor = phases[0][1] if how == "replace" else schedule(*phases)
        settings = {"may_join": False} | settings  # zeros are gradients like others
        self.workers = Workers(compressor, world_size, zeros(*SHAPES, dtype=dtype), buckets=2, **settings)
        self.short = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        self.largest = 0.0
        """The largest number so far among gradients, means, residuals, and shares times the ranks."""

    def step(self, times: float = 1.0) -> list[Tensor]:
        workers = self.workers
        return self.average(normal(workers.parameters, workers.world_size, seed=workers.step_number, scale=times))

    def average(self, gradients: list[list[Tensor]]) -> list[Tensor]:
        workers = self.workers
        self.replace()
        means = workers.step(gradients)
        for own in means[1:]:
            assert all(torch.equal(ours, first) for ours, first in zip(own, means[0], strict=True))
        for index, mean in enumerate(means[0]):
            self.short[index] += mean_of(gradients, index) - mean.double()
        kept = [t for table in workers.states for state in table.states() for t in state.tensors.values()]
        kept += [gradient for own in gradients for gradient in own] + means[0]
        self.largest = max(self.largest, largest(*kept) * workers.world_size)
        return means[0]

    def replace(self) -> None:
        """Let the compressor of this step take over, if there is another."""
        if self.workers.step_number in self._to_come:
            compressor = self._to_come.pop(self.workers.step_number)
            for engine in self.workers.engines:
                engine.replace(compressor, CPU)

    def owed(self, index: int) -> Tensor:
        """Return what entries in use hold of a parameter, in units of the mean; assert that all others hold nothing."""
        workers = self.workers
        name, parameter = workers.names[index], workers.parameters[index]
        total = torch.zeros(parameter.numel(), dtype=torch.float64)
        for rank, engine in enumerate(workers.engines):
            state, place = engine.state.of(parameter), Place(name, parameter, workers.world_size, step=engine.step - 1)
            in_use = engine.compressor.state(place)
            for entry, kept in state.tensors.items():
                declared = state.entries[entry]
                if entry not in in_use:
                    assert declared.kind not in ("residual", "share") or largest(kept) == 0, (entry, rank)
                elif declared.kind == "residual":
                    total += kept.double() / workers.world_size
                elif declared.kind == "share" and rank % declared.holders == 0:
                    servers = workers.world_size // declared.holders
                    blocks = parameter.numel() // declared.block
                    served = blocks_served(name, blocks, rank // declared.holders, servers)
                    whole = total[: blocks * declared.block].view(blocks, -1)
                    whole[list(served)] += kept.double()
        return total.view(parameter.shape)

    def loss(self, dtype: torch.dtype, stored: torch.dtype | None = None) -> float:
        """Return the most that rounding may have lost of an element so far.

        A step rounds it in the sum with the residual, in what is left of it on either hop, in the sum over ranks, its
        division, and the sum with the share: W + 5 times. Taking over rounds it twice: times W, and added. What is
        stored in a narrower dtype is rounded once more for each of residual and share. None is larger than `largest`.
        """
        steps = self.workers.step_number
        loss = steps * (self.workers.world_size + 7) * bounds.unit_roundoff(dtype)
        return self.largest * (loss + (2 * steps * bounds.unit_roundoff(stored) if stored else 0.0))

    def assert_nothing_is_lost(self, dtype: torch.dtype = torch.float64, stored: torch.dtype | None = None) -> None:
        for index, missing in enumerate(self.short):
            assert largest(missing - self.owed(index)) <= self.loss(dtype, stored)


def before_the_switch(how: str, **settings: Any) -> Run:
    """Return a run whose next step is the first with larger blocks."""
    run = Run(PHASES["larger blocks"], how, **settings)
    for _ in range(4):
        run.step()
    return run


@pytest.mark.parametrize(
    ("phases", "how", "policy"), covering(list(PHASES.values()), WAYS, ["fifo", "fused"], fast=5), ids=str
)
def test_what_is_owed_is_handed_over_and_nothing_is_lost(phases: Phases, how: str, policy: str) -> None:
    """Whatever is not sent yet is in an entry that the compressor of the step uses."""
    run = Run(phases, how, policy=policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(STEPS):
            run.step()
            run.assert_nothing_is_lost()


def test_a_share_goes_into_a_residual_that_did_not_exist_before() -> None:
    run = Run(((0, TwoHop(codec=Sign(block=8))), (1, make_compressor("top-k", ratio=0.2))), "replace")
    run.step()
    before = [run.owed(index) for index in range(len(SHAPES))]
    run.replace()
    for index, owed in enumerate(before):
        assert largest(run.owed(index) - owed) == 0 and (largest(owed) > 0.1) is (index != 2)  # 4 times, and a quarter


@every_way
@pytest.mark.parametrize("storage", ["bf16", "host"])
def test_state_is_handed_over_wherever_it_is_stored(how: str, storage: str) -> None:
    run = Run(PHASES["larger blocks"], how, storage=storage, dtype=torch.float32)
    for _ in range(STEPS):
        run.step()
        run.assert_nothing_is_lost(torch.float32, torch.bfloat16 if storage == "bf16" else None)


@every_way_and_policy
def test_an_inf_in_the_first_step_after_a_switch_undoes_none_of_it(how: str, policy: str) -> None:
    run = before_the_switch(how, policy=policy, atomic=True)
    run.replace()
    spoiled = normal(run.workers.parameters, 4, seed=50)
    spoiled[2][0].view(-1)[3] = float("inf")
    run.workers.step(spoiled)
    for _ in range(2):
        run.assert_nothing_is_lost()
        run.step()


@every_way
def test_what_no_rank_uses_in_the_first_step_after_a_switch_is_owed_still(how: str) -> None:
    run = before_the_switch(how, may_be_unused=True)
    gradients = normal(run.workers.parameters, 4, seed=50)
    for own in gradients:
        own[0].zero_()
    means = run.average(gradients)
    run.assert_nothing_is_lost()
    assert not means[0].any() and largest(run.owed(0)) > 0.1


@pytest.mark.parametrize(
    ("name", "how", "policy"),
    covering(["larger blocks", "machines, then ranks", "by parameter"], WAYS, ["fifo", "fused"], fast=1),
)
def test_a_run_saved_around_a_switch_is_resumed_bit_for_bit(name: str, how: str, policy: str) -> None:
    """Saved before the switch, at it, and after it, before the next step; a scale of 3 makes every product round."""
    phases, tensors = PHASES[name], {f"layer{number}": tensor for number, tensor in enumerate(zeros(*SHAPES))}
    first, then = (phases[0][1], phases[1][1]) if how == "replace" else (schedule(*phases),) * 2
    ran, saved = exchangers(tensors, first, 4, policy), []
    for step in range(STEPS):
        if step in (3, 4, 5):
            saved.append((step, first if step < 5 else then, [roundtrip(one.state_dict()) for one in ran]))
        replace(ran, then if step >= 4 else first)
        if step == 4:
            saved.append((step, then, [roundtrip(one.state_dict()) for one in ran]))
        average(ran, tensors, step)
    for begun, compressor, states in saved:
        resumed = exchangers(tensors, compressor, 4, policy)
        for one, state in zip(resumed, states, strict=True):
            one.load_state_dict(state)
        for step in range(begun, STEPS):
            replace(resumed, then if step >= 4 else first)
            average(resumed, tensors, step)
        for one, other in zip(resumed, ran, strict=True):
            assert_equal(one.state_dict()["local"], other.state_dict()["local"])


def replace(ran: Sequence[commhooks.Exchanger], compressor: Compressor) -> None:
    for one in ran:
        if one.engine.compressor != compressor:
            one.engine.replace(compressor, CPU)


def average(ran: Sequence[commhooks.Exchanger], tensors: dict[str, Tensor], step: int) -> None:
    for one in ran:
        one.set_grad_scale(3.0**step)
    average_in_lockstep(ran, gradients_of(tensors, step, 4, scale=3.0**step))


def assert_equal(ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, theirs[key]), key
        else:
            assert_equal(value, theirs[key])


@every_way
@pytest.mark.parametrize(
    ("first", "then", "fate"),
    [
        (sign(), AllReduceMean(), "kept in the residual until a compressor with error feedback takes over"),
        (TwoHop(codec=Sign(block=8)), AllReduceMean(), "lost|kept, but not sent"),
        (sign(), machines(int8()), "lost|kept, but not sent"),
    ],
    ids=["no residual is in use", "there is no residual", "machines share the residual"],
)
def test_what_no_residual_in_use_can_take_is_named_with_its_norm(
    how: str, first: Compressor, then: Compressor, fate: str
) -> None:
    run = Run(((0, first), (2, then)), how)
    run.step()
    run.step()
    with pytest.warns(UserWarning, match=f"from step 2 on no residual in use can take it; it is ({fate})") as told:
        run.step()
    of_servers = [str(one.message) for one in told if "server error" in str(one.message)]
    assert len(of_servers) == 4 and all("of layer0, layer1, layer3 holds" in text for text in of_servers)
    assert all(float(text.split("(norm ")[1].split()[0]) > 0.1 for text in of_servers)


@every_way
def test_state_saved_after_something_could_not_be_taken_loads_into_a_new_run(how: str) -> None:
    tensors = {f"layer{number}": tensor for number, tensor in enumerate(zeros(*SHAPES))}
    first, then = sign(), AllReduceMean()
    both = schedule((0, first), (2, then))
    ran = exchangers(tensors, first if how == "replace" else both, 4)
    with warnings.catch_warnings(record=True):
        for step in range(3):
            if how == "replace" and step == 2:
                replace(ran, then)
            average(ran, tensors, step)
    for one, other in zip(exchangers(tensors, then if how == "replace" else both, 4), ran, strict=True):
        one.load_state_dict(roundtrip(other.state_dict()))


def test_what_waits_for_a_compressor_that_was_announced_is_not_warned_of() -> None:
    run = Run(((0, sign()), (2, AllReduceMean()), (4, sign())), "replace")
    for engine in run.workers.engines:
        engine.state.successors = sign(), AllReduceMean()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            run.step()
    run.assert_nothing_is_lost()
