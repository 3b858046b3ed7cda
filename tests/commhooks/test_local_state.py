"""State of a rank's own that is not the residual: what becomes of it where state must change without its compressor."""

from __future__ import annotations

import dataclasses
import io
import warnings

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import LoadRules, make_compressor
from commhooks.compressors.powersgd.adaptive_rank import NORMS
from commhooks.compressors.two_hop import SERVER_ERROR
from commhooks.errors import CompressorError
from commhooks.language import AllReduce, BucketView, Compressor, Context, Entry, Exchange, Place, Slot
from commhooks.state.loss_scale import LossScale
from commhooks.state.table import StateTable
from tests.commhooks.workers import Workers, largest, mean_of, normal, take_up, zeros

BLOCK = 8
SHAPES = ((9, 10), (5, 7), (6,), (40,))
"""11 blocks and a rest of 2; 4 and 3; a rest alone; 5 blocks."""


def sign() -> Compressor:
    return make_compressor("sign", block=BLOCK)


def trained(world_size: int = 4) -> Workers:
    workers = Workers(sign(), world_size, zeros(*SHAPES, dtype=torch.float64))
    for step in range(3):
        workers.step(normal(workers.parameters, world_size, seed=step))
    return workers


def error(workers: Workers, rank: int, index: int = 0) -> Tensor:
    return workers.states[rank].of(workers.parameters[index])[SERVER_ERROR]


def taken_up(ran: Workers, world_size: int, how: str) -> Workers:
    """Return so many workers that go on from what others have saved."""
    merged = commhooks.merge_state_dicts(torch.load(io.BytesIO(ran.saved())))
    workers = Workers(sign(), world_size, zeros(*SHAPES, dtype=torch.float64))
    for engine in workers.engines:
        take_up(engine, merged, LoadRules(world_size=how))
    return workers


@pytest.mark.parametrize("how", ["spread", "spread-mean"])
def test_shares_are_dealt_again_for_other_numbers_of_ranks_and_lose_nothing(how: str) -> None:
    """4, 2 and 4 ranks again: under "spread" the sum over ranks of what is unsent stays, otherwise the mean.

    Halves and doubles lose no digit, so servers' errors of 4 ranks come back bit for bit.
    """
    first = trained(4)
    fewer = taken_up(first, 2, how)
    again = taken_up(fewer, 4, how)
    for index, shape in enumerate(SHAPES):
        before, between, after = (workers.unsent(index) for workers in (first, fewer, again))
        times = 2.0 if how == "spread" else 1.0
        assert largest(between - times * before) <= 1e-14  # a few roundings of numbers below 16, in float64
        assert largest(after - before) <= 1e-14
        if torch.Size(shape).numel() >= BLOCK:
            for rank in range(2):
                assert largest(error(fewer, rank, index)) > 0.05
            for rank in range(4):
                assert torch.equal(error(again, rank, index), error(first, rank, index))


@pytest.mark.parametrize(("old", "new"), [(4, 3), (3, 4), (4, 4)])
def test_ranks_that_keep_their_own_move_nothing(old: int, new: int) -> None:
    """Their residuals go on bit for bit; with other ranks, what they serve for all starts from zero."""
    before = trained(old)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        after, first = (taken_up(before, new, "keep") for _ in range(2))
    told = " ".join(str(one.message) for one in heard)
    for rank in range(old):
        norm = float(sum(before.residual(rank, index).square().sum() for index in range(len(SHAPES)))) ** 0.5
        assert (f"that of rank {rank} (norm {norm:.4g})" in told) == (rank >= new), told
    for index in range(len(SHAPES)):
        for rank in range(new):
            kept = before.residual(rank, index) if rank < old else torch.zeros(SHAPES[index], dtype=torch.float64)
            assert torch.equal(after.residual(rank, index), kept)
    means = after.step(normal(after.parameters, new, seed=9))
    assert all(torch.equal(a, b) for own in means for a, b in zip(own, means[0], strict=True))
    held = [first.states[rank].of(first.parameters[0]).tensors.get(SERVER_ERROR) for rank in range(new)]
    assert all((kept is None) == (old != new) for kept in held), "laid out from zero in the next step"


def test_state_that_waits_for_names_is_handed_over_once_they_are_known() -> None:
    """The first parameter has one block: two ranks send it as a code, four send it whole, and keep no share of it."""
    int8 = make_compressor("int8", block=32)
    ran, resumed = (
        Workers(int8, ranks, zeros((32,), (64, 33), dtype=torch.float64), may_join=False) for ranks in (2, 4)
    )
    for step in range(3):
        ran.step(normal(ran.parameters, 2, seed=step))
    owed = [ran.unsent(index) for index in range(2)]
    merged = commhooks.merge_state_dicts(torch.load(io.BytesIO(ran.saved())))
    for engine in resumed.engines:
        engine.state._names.clear()  # as of a hook that PyTorch's DDP calls before `bind`
        take_up(engine, merged, LoadRules(world_size="spread-mean"))
        engine.bind(list(zip(resumed.names, resumed.parameters, strict=True)))
    sent = [torch.zeros_like(one) for one in owed]
    for _ in range(3):
        means, *_ = resumed.step([[torch.zeros_like(one) for one in resumed.parameters]] * 4)
        sent = [before + mean for before, mean in zip(sent, means, strict=True)]
    assert all("server error" not in table.of(resumed.parameters[0]).tensors for table in resumed.states)
    # Numbers of at most 4 shares and a residual are rounded fewer than 16 times.
    limit = 16 * torch.finfo(torch.float64).eps * 8 * largest(*owed, *sent)
    for index in range(2):
        assert largest(owed[index]) > 0.001
        assert largest(owed[index] - sent[index] - resumed.unsent(index)) <= limit
    assert not largest(resumed.unsent(0))


def test_reset_forgets_shares_and_residuals() -> None:
    workers = taken_up(trained(), 2, "reset")
    workers.step([workers.parameters] * 2)
    assert not any(largest(workers.unsent(index)) for index in range(len(SHAPES)))


def test_replicated_state_follows_the_loss_scale_from_the_first_step_of_a_resumed_run() -> None:
    """It is not laid out yet when the scale is looked at, before that step's first bucket."""
    compressor = make_compressor("adaptive-rank", rank=2, max_rank=4, every=3)
    ran, resumed = (Workers(compressor, 2, zeros((24, 40))) for _ in range(2))
    for step in range(2):
        ran.step(normal(ran.parameters, 2, seed=step))
    resumed.resume(ran.saved())
    for before, engine in zip(ran.states, resumed.engines, strict=True):
        engine.loss_scale.announce(4.0)
        engine.loss_scale.apply_to(engine.state.by_units, torch.device("cpu"))
        norms, now = (before.of(ran.parameters[0])[NORMS], engine.state.of(resumed.parameters[0])[NORMS])
        assert norms.any() and torch.equal(now, 4 * norms)


def test_a_residual_of_what_a_code_sends_whole_is_sent_once() -> None:
    """A schedule may hand over the residual of a parameter that is smaller than the next code's blocks."""
    codes = make_compressor("int8", block=32, error_feedback=False)
    compressor = commhooks.ErrorFeedback(
        inner=commhooks.StartAfter(
            before=make_compressor("top-k", ratio=0.1, error_feedback=False), inner=codes, steps=2
        )
    )
    workers = Workers(compressor, 2, zeros((20,), (40,), dtype=torch.float64))
    short = torch.zeros(20, dtype=torch.float64)
    for step in range(5):
        gradients = normal(workers.parameters, 2, seed=step)
        short += mean_of(gradients, 0) - workers.step(gradients)[0][0]
        assert largest(short - workers.unsent(0)) <= 1e-13  # a few roundings of numbers below 16, in float64
        assert bool(workers.unsent(0).any()) is (step < 2)


def test_units_are_powers_of_the_loss_scale() -> None:
    table, parameter = StateTable(), torch.zeros(2)
    entries = {
        "residual": Entry(kind="residual"),
        "squares": Entry(kind="private", units=2),
        "counts": Entry(kind="private", units=0),
        "basis": Entry(kind="replicated"),
        "served": Entry(kind="share", block=2),
    }
    slot = Slot(parameter, parameter, table.of(parameter))
    table.lay_out_entries(slot, {name: dataclasses.replace(e, init=torch.ones_like) for name, e in entries.items()})
    scale = LossScale()
    scale.announce(4.0)
    scale.apply_to(table.by_units, torch.device("cpu"))
    assert {name: kept.flatten()[0].item() for name, kept in table.of(parameter).tensors.items()} == {
        "residual": 4.0, "squares": 16.0, "counts": 1.0, "basis": 1.0, "served": 4.0,
    }  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadsWhatItDoesNotDeclare(Compressor):
    """Ask first, so that the state is missed in the middle of a step."""

    def state(self, place: Place) -> dict[str, Entry]:
        return {"y": Entry(kind="private")}

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        means = yield AllReduce(*(slot.part(slot.form()) for slot in bucket.slots), average=True, last=True)
        for slot, mean in zip(bucket.slots, means, strict=True):
            slot.write(mean + slot.state("x"))


@pytest.mark.parametrize("policy", ["fifo", "fused"])
def test_state_that_nobody_declared_is_named(policy: str) -> None:
    workers = Workers(ReadsWhatItDoesNotDeclare(), 2, zeros((4, 5)), policy=policy)
    complaint = r"parameter 'layer0' has no state 'x': no compressor has declared it; .*\(declared: y\)"
    with pytest.raises(CompressorError, match=rf"rank 0, step 0, bucket 0 \(parameters layer0\): .*{complaint}"):
        workers.step(normal(workers.parameters, 2, seed=0))
