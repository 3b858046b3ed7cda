"""Laws that hold for whatever can be built and attached: random compressors, wrapped and nested, one for each seed."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks import (
    CheckpointError,
    Compressor,
    LoadRules,
    SettingsError,
    make_compressor,
    merge_state_dicts,
)
from commhooks.compressors import Cast, DeMo, Half, Signum, TwoHop
from commhooks.saving.saved import SavedChannel
from commhooks.wrappers import WireDtype
from tests import bounds
from tests.commhooks.nestings import NAMES, SHAPES, conserves, drawn, drawn_by_name, every_one_in
from tests.commhooks.workers import Workers, largest, mean_of, normal, take_up
from tests.tiers import A_ROW, rows

EVERY_TIME, SEEDS = 10, 1000
WORLD_SIZES = (1, 2, 3, 4, 4, 4, 6, 8)
ROUNDINGS = 64
"""How many times any code rounds an element; `demo` does so most often, in tests/cases.py."""
RANK = 5

pytestmark = pytest.mark.kernels


class Nesting:
    """A seed's compressor, and the run that it is tried in."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed = seed
        self.dtype = draw.choice((torch.float64, torch.float64, torch.float32))
        self.world_size = draw.choice(WORLD_SIZES)
        self.other_size = draw.choice([size for size in WORLD_SIZES if size != self.world_size])
        self.policy, self.buckets = draw.choice(("fifo", "fused")), draw.randint(1, 3)
        self.saved_after = draw.randint(1, 6)
        tensors = {name: torch.zeros(shape, dtype=self.dtype) for name, shape in SHAPES.items()}
        if draw.random() < 0.5:
            tensors["body.1.weight"] = tensors["body.1.weight"].contiguous(memory_format=torch.channels_last)
        self.tensors = tensors
        self.compressor = drawn(draw, tensors, self.world_size)
        self.another = drawn(draw, tensors, self.world_size)

    def workers(self, compressor: Compressor | None = None, world_size: int = 0, **settings: Any) -> Workers:
        return Workers(
            compressor or self.compressor, world_size or self.world_size, list(self.tensors.values()),
            list(self.tensors), buckets=self.buckets, policy=self.policy, **settings,
        )  # fmt: skip

    def gradients(self, step: int, world_size: int = 0) -> list[list[Tensor]]:
        return normal(list(self.tensors.values()), world_size or self.world_size, seed=1000 * self.seed + step)

    @property
    def wire(self) -> torch.dtype | None:
        """The narrowest dtype that sums travel in."""
        narrow = {one.dtype for one in every_one_in(self.compressor) if isinstance(one, (Cast, WireDtype))}
        return max(narrow, key=bounds.unit_roundoff, default=None)

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.compressor}, {self.world_size} ranks, {self.dtype}, {self.policy}, "
            f"{self.buckets} buckets, saved after {self.saved_after} steps"
        )


def assert_agree(means: Sequence[Sequence[Tensor]]) -> None:
    for own in means:
        assert all(torch.equal(ours, first) for ours, first in zip(own, means[0], strict=True)), "replicas differ"


def assert_conserved(
    nesting: Nesting, workers: Workers, gradients: list[list[Tensor]], step: int
) -> list[list[Tensor]]:
    """Make a step, and assert that what is not sent of it is kept, for those parameters of which that is claimed."""
    indices = range(len(workers.parameters))
    before = [workers.unsent(index) for index in indices]
    residuals = [[workers.residual(rank, index).double() for index in indices] for rank in range(workers.world_size)]
    means = workers.step(gradients)
    # Of one matrix of all parameters, since some compressors make one.
    to_send = [
        torch.cat([(g.double() + e).flatten() for g, e in zip(own, kept, strict=True)])
        for own, kept in zip(gradients, residuals, strict=True)
    ]
    # In fp32, since some codes decode in it whatever the gradient's dtype is.
    allowed = bounds.of_conservation(to_send, RANK, torch.float32, nesting.wire, ROUNDINGS)
    for index, (name, parameter) in enumerate(zip(workers.names, workers.parameters, strict=True)):
        if conserves(workers.compressor, name, parameter, step):
            lost = largest(means[0][index] + workers.unsent(index) - mean_of(gradients, index) - before[index])
            assert lost <= allowed, f"step {step}: of {name}, {lost} is neither sent nor kept"
    return means


State = list[dict[tuple[str, str], Tensor]]


def own_state(workers: Workers, *, replicated: bool = False) -> State:
    """Return a copy of what each rank has of its own, by parameter and entry; if asked, also of what all have."""
    return [
        {
            (name, entry): kept.clone()
            for part in table.export()[0 if replicated else 1 :]
            for name, entries in part.items()
            for entry, kept in entries.items()
        }
        for table in workers.states
    ]


def same(ours: State, theirs: State) -> bool:
    return all(
        own.keys() == other.keys() and all(torch.equal(own[key], other[key]) for key in own)
        for own, other in zip(ours, theirs, strict=True)
    )


def handed_over(workers: Workers) -> Workers:
    """Do what a step begins with if another compressor takes over in it: what is owed goes where it will be sent."""
    for engine in workers.engines:
        engine.buckets.hand_over(engine.compressor, engine.step)
    return workers


def loaded(workers: Workers, state: dict[str, Any], rules: LoadRules) -> Workers:
    for engine in workers.engines:
        take_up(engine, state, rules)
    return workers


def check(nesting: Nesting) -> None:
    ran = nesting.workers()
    for step in range(nesting.saved_after):
        assert_agree(assert_conserved(nesting, ran, nesting.gradients(step), step))
    check_bytes(ran)
    saved = ran.saved()
    merged = merge_state_dicts(torch.load(io.BytesIO(saved)))
    assert make_compressor(str(nesting.compressor)) == nesting.compressor

    resumed = nesting.workers()
    resumed.resume(saved)
    assert same(own_state(resumed), own_state(ran)), "what was loaded is not what was saved"
    check_scaled(nesting, saved)
    check_joined(nesting, saved)
    check_spoiled(nesting, saved)
    for step in range(nesting.saved_after, nesting.saved_after + 3):
        gradients = nesting.gradients(step)
        assert_agree([*resumed.step(gradients), *assert_conserved(nesting, ran, gradients, step)])
    ours, theirs = (own_state(workers, replicated=True) for workers in (resumed, ran))
    assert same(ours, theirs), "the resumed run's state is not that of the one that went on"
    assert resumed.states[0].kinds() == ran.states[0].kinds()

    check_other_sizes(nesting, merged)
    check_other_settings(nesting, merged)


def check_bytes(ran: Workers) -> None:
    """Assert that all that is sent is some parameter's, but for padding: to 8 bytes, and of slices to one length."""
    by_parameter = ran.ledger.by_parameter()
    sent = sum(one.payload_bytes for one in by_parameter.values())
    assert set(by_parameter) == set(SHAPES)
    assert abs(sent - ran.traffic.payload_bytes) <= 8 * 8 * ran.traffic.collectives
    assert ran.traffic.payload_bytes > 0


def check_scaled(nesting: Nesting, saved: bytes) -> None:
    """Assert that a run whose loss scale grows by a power of two as it is resumed has the same means, times that.

    Unless they are signs, or something travels in fp16, which may not hold them.
    """
    inside = every_one_in(nesting.compressor)
    signs = any(isinstance(one, Signum) or (isinstance(one, DeMo) and one.sign) for one in inside)
    halves = any(isinstance(one, TwoHop) and isinstance(one.codec, Half) for one in inside)
    if signs or halves or nesting.wire is not None:
        return
    plain, scaled = nesting.workers(), nesting.workers()
    for workers in (plain, scaled):
        workers.resume(saved)
    for engine in scaled.engines:
        engine.loss_scale.announce(1024.0)
    for step in range(50, 52):
        gradients = nesting.gradients(step)
        larger = [[gradient * 1024 for gradient in own] for own in gradients]
        for ours, theirs in zip(scaled.step(larger)[0], plain.step(gradients)[0], strict=True):
            assert torch.equal(ours, theirs * 1024), "state does not follow the loss scale"


def check_joined(nesting: Nesting, saved: bytes) -> None:
    """Assert that a rank that has run out of inputs keeps what is its own alone, and that ranks agree."""
    workers = nesting.workers()
    workers.resume(saved)
    before = own_state(handed_over(workers))[0]
    gradients = nesting.gradients(60)
    gradients[0] = [torch.zeros_like(gradient) for gradient in gradients[0]]
    assert_agree(workers.step(gradients))
    after, kinds = own_state(workers)[0], workers.states[0].kinds()
    for (name, entry), kept in before.items():
        if kinds[name][entry].kind != "share" and kinds[name][entry].holders == 1:
            assert torch.equal(after[name, entry], kept), f"a joined rank's {entry} of {name} changed"


def check_spoiled(nesting: Nesting, saved: bytes) -> None:
    """Assert that an inf on one rank shows on every rank, and that an atomic run then keeps its state."""
    workers = nesting.workers(atomic=True)
    workers.resume(saved)
    before = own_state(handed_over(workers))
    spoiled = nesting.gradients(70)
    spoiled[-1][0].view(-1)[3] = float("inf")
    for means in workers.step(spoiled):
        assert not all(torch.isfinite(mean).all() for mean in means), "an inf is not shown"
    after = [{key: own[key] for key in kept} for own, kept in zip(own_state(workers), before, strict=True)]
    assert same(after, before), "a spoiled step changed state"
    after_it = workers.step(nesting.gradients(71))
    assert_agree(after_it)
    assert all(torch.isfinite(mean).all() for mean in after_it[0])


def held_of(workers: Workers, index: int) -> float:
    """Return the sum over the ranks of the largest number that each holds of a parameter."""
    states = [table.of(workers.parameters[index]) for table in workers.states]
    return sum(largest(*state.of_kind("residual", "share").values()) for state in states)


def check_other_sizes(nesting: Nesting, merged: dict[str, Any]) -> None:
    """Assert that other ranks keep the sum or the mean of what is unsent, or begin from zero if asked to."""
    size = nesting.other_size
    try:
        nesting.compressor.check(nesting.tensors, size)
    except SettingsError:
        return
    with pytest.raises(CheckpointError, match="pass world_size='spread'"):
        loaded(nesting.workers(world_size=size), merged, LoadRules())
    before = loaded(nesting.workers(), merged, LoadRules())
    for how, ratio in (("spread", nesting.world_size / size), ("spread-mean", 1.0), ("reset", 0.0)):
        after = loaded(nesting.workers(world_size=size), merged, LoadRules(world_size=how))
        for index, name in enumerate(after.names):
            now = after.unsent(index)
            held = held_of(after, index)
            rounded = bounds.unit_roundoff(nesting.dtype) * (largest(now) + 2 * held)
            # What is unsent is a sum over the ranks, in float64: each of its terms is rounded once, at most.
            summed = nesting.world_size + size
            rounded += bounds.unit_roundoff(torch.float64) * summed * (held + held_of(before, index))
            lost = largest(now - before.unsent(index) * ratio)
            assert lost <= rounded, f"{how}: of {name}, {lost} is lost"
        assert_agree(assert_conserved(nesting, after, nesting.gradients(80, size), nesting.saved_after))


def check_other_settings(nesting: Nesting, merged: dict[str, Any]) -> None:
    """Assert that another compressor takes state over or refuses it, and never drops it without permission."""
    saved = [SavedChannel.from_dict(merged).local[rank] for rank in range(nesting.world_size)]
    other = nesting.workers(nesting.another)
    with contextlib.suppress(CheckpointError):
        loaded(other, merged, LoadRules(settings="change"))
        for table, entries in zip(other.states, saved, strict=True):
            now = table.export()[1]
            for name, kept in entries.items():
                for entry, tensor in kept.items():
                    assert torch.equal(now[name][entry], tensor), f"{entry} of {name} was dropped without a word"
    dropped = loaded(nesting.workers(nesting.another), merged, LoadRules(settings="change", missing="reset"))
    for workers in (other, dropped):
        assert_agree(workers.step(nesting.gradients(90)))


@A_ROW
def test_every_name_of_the_registry_can_be_drawn() -> None:
    """Nothing is left out of the nestings because its settings are not known."""
    missing = set(NAMES)
    for name, seed in itertools.product(NAMES, range(20)):
        with contextlib.suppress(SettingsError):  # MXFP8 and MXFP4 take blocks of 32 alone
            drawn_by_name(random.Random(seed), name)
            missing.discard(name)
    assert not missing


@pytest.mark.parametrize(
    "seed",
    [
        *rows(range(EVERY_TIME), unless=lambda seed: seed == 0),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(EVERY_TIME, SEEDS)),
    ],
)
def test_whatever_can_be_built_obeys_the_laws(seed: int) -> None:
    nesting = Nesting(seed)
    print(nesting)
    check(nesting)
