"""State of a rank's own that is not the residual: what becomes of it where state must change without its compressor."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import LoadRules, make_compressor
from commhooks.compressors.powersgd.adaptive_rank import NORMS
from commhooks.compressors.two_hop import SERVER_ERROR
from commhooks.engine.replay import Resumed
from commhooks.errors import CompressorError
from commhooks.language import AllReduce, BucketView, Compressor, Context, Entry, Exchange, Place, Slot
from commhooks.saving.misfits import Declaration, misfits
from commhooks.saving.saved import SavedChannel
from commhooks.saving.settings import settings_of
from commhooks.state.loss_scale import LossScale
from commhooks.state.table import StateTable
from tests.commhooks.workers import Workers, largest, mean_of, normal, take_up, zeros

BLOCK = 8
SHAPES = ((9, 10), (5, 7), (6,), (40,))
"""11 blocks and a rest of 2; 4 and 3; a rest alone; 5 blocks."""


def sign() -> Compressor:
    return make_compressor("sign", block=BLOCK)


def trained(world_size: int = 4, steps: int = 3, **settings: Any) -> tuple[Workers, list[Tensor]]:
    """Return workers after some steps, and what the means sent so far fall short of those of the gradients."""
    dtype = settings.pop("dtype", torch.float64)
    workers = Workers(sign(), world_size, zeros(*SHAPES, dtype=dtype), **settings)
    short = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(steps):
        gradients = normal(workers.parameters, world_size, seed=step)
        for index, mean in enumerate(workers.step(gradients)[0]):
            short[index] += mean_of(gradients, index) - mean.double()
    return workers, short


def error(workers: Workers, rank: int, index: int = 0) -> Tensor:
    return workers.states[rank].of(workers.parameters[index])[SERVER_ERROR]


def snapshot_of(workers: Workers) -> SavedChannel:
    return SavedChannel(
        step=3, world_size=workers.world_size, policy="fifo", grad_scale=1.0, settings=settings_of(workers.compressor),
        shapes={name: list(p.shape) for name, p in zip(workers.names, workers.parameters, strict=True)},
        bucket_plan={}, kinds=workers.states[0].kinds(), replicated={},
        local={rank: table.export()[1] for rank, table in enumerate(workers.states)},
    )  # fmt: skip


def declaration(workers: Workers, compressor: Compressor, saved_size: int, rank: int = 0) -> Declaration:
    named = dict(zip(workers.names, workers.parameters, strict=True))
    now, then = (
        {name: [compressor.state(Place(name, parameter, size))] for name, parameter in named.items()}
        for size in (workers.world_size, saved_size)
    )
    return Declaration(compressor=compressor, named=named, rank=rank, world_size=workers.world_size, now=now, then=then)


def taken_up(saved: SavedChannel, world_size: int, how: str) -> Workers:
    """Return so many workers that go on from a snapshot."""
    rules = LoadRules(world_size=how)
    workers = Workers(sign(), world_size, zeros(*SHAPES, dtype=torch.float64))
    for rank, engine in enumerate(workers.engines):
        assert misfits(saved, declaration(workers, sign(), saved.world_size, rank), rules) == []
        engine.state.load(saved.replicated, saved.entries_for(rank, world_size, rules), saved.kinds)
        engine.go_on_from(saved.step, saved.grad_scale, Resumed())
    return workers


@pytest.mark.parametrize("how", ["spread", "spread-mean"])
def test_shares_are_dealt_again_for_other_numbers_of_ranks_and_lose_nothing(how: str) -> None:
    """4, 2 and 4 ranks again: under "spread" the sum over ranks of what is unsent stays, otherwise the mean.

    Halves and doubles lose no digit, so servers' errors of 4 ranks come back bit for bit.
    """
    first, _ = trained(4)
    fewer = taken_up(snapshot_of(first), 2, how)
    again = taken_up(snapshot_of(fewer), 4, how)
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
    before, _ = trained(old)
    saved = snapshot_of(before)
    after = taken_up(saved, new, "keep")
    assert saved.lost_with(new).keys() == set(range(new, old))
    for number, norm in saved.lost_with(new).items():
        total = sum(before.residual(number, index).square().sum() for index in range(len(SHAPES)))
        assert norm == pytest.approx(float(total) ** 0.5)
    for index in range(len(SHAPES)):
        for rank in range(new):
            kept = before.residual(rank, index) if rank < old else torch.zeros(SHAPES[index], dtype=torch.float64)
            assert torch.equal(after.residual(rank, index), kept)
    means = after.step(normal(after.parameters, new, seed=9))
    assert all(torch.equal(a, b) for own in means for a, b in zip(own, means[0], strict=True))
    first = taken_up(saved, new, "keep")
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
    saved = snapshot_of(trained()[0])
    assert saved.entries_for(0, 2, LoadRules(world_size="reset")) == {}
    workers = taken_up(saved, 2, "reset")
    workers.step([workers.parameters] * 2)
    assert not any(largest(workers.unsent(index)) for index in range(len(SHAPES)))
    same = LoadRules(world_size="spread")
    assert saved.entries_for(1, 4, same) == saved.local[1]


def test_what_is_like_a_residual_is_spread_with_it() -> None:
    local = {rank: {"w": {"residual": torch.full((3,), 1.0 + rank), "m": torch.full((3,), 10.0)}} for rank in range(4)}
    kinds = {"w": {"residual": Entry(kind="residual"), "m": Entry(kind="private", units=0)}}
    saved = dataclasses.replace(snapshot_of(trained()[0]), local=local, kinds=kinds)
    spread = [saved.entries_for(rank, 2, LoadRules(world_size="spread"))["w"] for rank in range(2)]
    assert [kept["residual"][0].item() for kept in spread] == [4.0, 6.0]
    assert [kept["m"][0].item() for kept in spread] == [20.0, 20.0]


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
