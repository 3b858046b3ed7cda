"""Local state that is not the residual: what becomes of it where state must change without its compressor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import Context, LoadRules, LocalEntry, Snapshot, run_lockstep
from commhooks.engine.guards import refuse_what_is_not_declared, take_part_with_zeros
from commhooks.state.loss_scale import LossScale
from commhooks.state.memory import memory_report
from commhooks.state.snapshot import settings_of
from commhooks.state.table import StateTable
from tests.commhooks.models import wrap
from tests.commhooks.ranks import run_ranks
from tests.commhooks.two_hops import SERVER_ERROR, TwoHops
from tests.commhooks.workers import Workers, mean_of, normal, zeros

SIZE = 22
"""Not a multiple of the ranks."""


def trained(world_size: int = 4, steps: int = 3, **settings: Any) -> tuple[Workers, Tensor]:
    """Return workers after some steps, and what the means sent so far fall short of those of the gradients."""
    dtype = settings.pop("dtype", torch.float64)
    workers = Workers(TwoHops(), world_size, zeros((SIZE,), dtype=dtype), **settings)
    short = torch.zeros(SIZE, dtype=torch.float64)
    for step in range(steps):
        gradients = normal(workers.parameters, world_size, seed=step)
        short += mean_of(gradients, 0) - workers.step(gradients)[0][0].double()
    return workers, short


def owed(workers: Workers) -> Tensor:
    """Return what is to reach the model yet: the mean of the residuals, and every rank's share."""
    residuals = torch.stack([workers.residual(rank, 0).double() for rank in range(workers.world_size)])
    return residuals.mean(0) + torch.cat([error(workers, rank).double() for rank in range(workers.world_size)])[:SIZE]


def error(workers: Workers, rank: int) -> Tensor:
    return workers.states[rank].of(workers.parameters[0]).local[SERVER_ERROR]


def snapshot_of(workers: Workers) -> Snapshot:
    return Snapshot(
        step=3, world_size=workers.world_size, policy="fifo", grad_scale=1.0, settings=settings_of(workers.compressor),
        shapes={}, bucket_plan={}, replicated={},
        local={rank: table.export()[1] for rank, table in enumerate(workers.states)},
    )  # fmt: skip


def test_two_hops_lose_nothing() -> None:
    workers, short = trained()
    assert max(float(error(workers, rank).abs().max()) for rank in range(4)) > 0.1
    assert (short - owed(workers)).abs().max() <= 1e-13  # some 50 roundings of numbers below 4, in float64


@pytest.mark.parametrize("how", ["spread", "spread-mean"])
def test_a_share_cannot_be_spread_and_says_so(how: str) -> None:
    saved = snapshot_of(trained()[0])
    faults = saved.differences(TwoHops(), {}, 2, 0, LoadRules(world_size=how))
    assert faults == [
        "local state 'server error' is each rank's share of 4 ranks and cannot be spread over 2; pass "
        "world_size='reset' to start all local state from nothing"
    ]
    assert saved.differences(TwoHops(), {}, 2, 0, LoadRules(world_size="reset")) == []
    assert saved.entries_for(0, 2, LoadRules(world_size="reset")) == {}
    assert saved.differences(TwoHops(), {}, 4, 0, LoadRules(world_size=how)) == []
    assert saved.entries_for(1, 4, LoadRules(world_size=how)) == saved.local[1]


def test_what_is_like_a_residual_is_spread_with_it() -> None:
    local = {rank: {"w": {"residual": torch.full((3,), 1.0 + rank), "m": torch.full((3,), 10.0)}} for rank in range(4)}
    saved = snapshot_of(trained()[0])
    saved = Snapshot(**{name: getattr(saved, name) for name in saved.__dataclass_fields__} | {"local": local})
    declaring = TwoHops(entries={"m": LocalEntry(kind="residual", units=0)})
    assert not [f for f in saved.differences(declaring, {}, 2, 0, LoadRules(world_size="spread")) if "local" in f]
    spread = [saved.entries_for(rank, 2, LoadRules(world_size="spread"))["w"] for rank in range(2)]
    assert [kept["residual"][0].item() for kept in spread] == [4.0, 6.0]
    assert [kept["m"][0].item() for kept in spread] == [20.0, 20.0]


def test_state_that_the_compressor_does_not_keep_is_refused_or_dropped() -> None:
    saved, powersgd = snapshot_of(trained()[0]), commhooks.PowerSGD()
    faults = saved.differences(powersgd, {}, 4, 0, LoadRules(settings="change"))
    assert faults == [
        "checkpoint has local state 'server error', which PowerSGD does not keep; pass missing='reset' to drop it"
    ]
    assert saved.differences(powersgd, {}, 4, 0, LoadRules(settings="change", missing="reset")) == []
    dropped = saved.without_entries_unknown_to(powersgd)
    assert dropped.local[2]["layer0"].keys() == {"residual"}
    assert saved.without_entries_unknown_to(commhooks.WireDtype(inner=TwoHops(), dtype=torch.float16)) == saved


def test_the_loss_scale_takes_all_state_along_that_is_in_its_units() -> None:
    """A power of two changes no digit, so the scaled run's means are the other's, times the scale."""
    (plain, _), (scaled, _) = trained(dtype=torch.float32), trained(dtype=torch.float32)
    for table in scaled.states:
        scale = LossScale()
        scale.announce(1024.0)
        table.declare(TwoHops().local_entries())
        scale.apply_to(table.local_by_units(), torch.device("cpu"))
    gradients = normal(plain.parameters, 4, seed=9)
    larger = [[gradient * 1024 for gradient in own] for own in gradients]
    assert torch.equal(scaled.step(larger)[0][0], plain.step(gradients)[0][0] * 1024)


def test_units_are_powers_of_the_loss_scale() -> None:
    table, parameter = StateTable(), torch.zeros(2)
    table.declare({"squares": LocalEntry(kind="residual", units=2), "counts": LocalEntry(kind="residual", units=0)})
    table.of(parameter).local |= {name: torch.ones(2) for name in ("residual", "squares", "counts")}
    scale = LossScale()
    scale.announce(4.0)
    scale.apply_to(table.local_by_units(), torch.device("cpu"))
    assert {name: kept[0].item() for name, kept in table.of(parameter).local.items()} == {
        "residual": 4.0, "squares": 16.0, "counts": 1.0,
    }  # fmt: skip


def test_a_rank_that_has_joined_keeps_its_residual_and_goes_on_serving() -> None:
    workers, short = trained()
    gradients = normal(workers.parameters, 4, seed=9)
    gradients[0][0].zero_()
    before = {rank: (workers.residual(rank, 0).clone(), error(workers, rank).clone()) for rank in range(4)}
    exchanges = []
    for rank, (view,) in enumerate(workers.views):
        workers.states[rank].declare(TwoHops().local_entries())
        view.memory.copy_(gradients[rank][0])
        exchange = TwoHops().compress(view, Context(rank, 4, 3))
        exchanges.append(take_part_with_zeros(view, exchange) if rank == 0 else exchange)
    mean = run_lockstep(exchanges)[0].mean
    short += mean_of(gradients, 0) - mean
    assert torch.equal(workers.residual(0, 0), before[0][0])
    assert all(not torch.equal(error(workers, rank), before[rank][1]) for rank in range(4))
    assert (short - owed(workers)).abs().max() <= 1e-13  # as above


@pytest.mark.parametrize("storage", ["fp32", "bf16", "host"])
def test_local_state_is_kept_where_residuals_are_and_reported_with_them(storage: str) -> None:
    workers, _ = trained(world_size=2, dtype=torch.float32, storage=storage)
    assert error(workers, 0).dtype == (torch.bfloat16 if storage == "bf16" else torch.float32)
    report = memory_report(workers.states[0], [], [], [])
    assert report.residuals + report.residuals_on_host == (SIZE + SIZE // 2) * (2 if storage == "bf16" else 4)
    assert report.bases == 0


def test_local_state_that_nobody_declared_is_named_before_anything_is_lost() -> None:
    workers, _ = trained()
    table, view = workers.states[0], workers.views[0][0]
    complaint = r"'layer0' has local state 'server error', which no compressor has declared.*\(declared: residual\)"
    with pytest.raises(commhooks.CompressorError, match=complaint):
        table.local_by_units()
    with pytest.raises(commhooks.CompressorError, match=complaint):
        next(take_part_with_zeros(view, TwoHops().compress(view, Context(0, 1, 3))))
    alone, _ = trained(world_size=1)
    with pytest.raises(commhooks.CompressorError, match=complaint):
        run_lockstep(
            [refuse_what_is_not_declared(alone.views[0][0], TwoHops().compress(alone.views[0][0], Context(0, 1, 3)))]
        )


def test_in_training_undeclared_state_is_named_on_every_rank() -> None:
    for told in run_ranks(train_undeclared, 2, check_exit=False):
        assert "rank " in told and "has local state 'server error', which no compressor has declared" in told


def train_undeclared(rank: int) -> str:
    """Train with a share that is not declared; return the error."""
    model = wrap("core", torch.nn.Linear(8, 4, bias=False))
    commhooks.attach(model, TwoHops(entries={}))
    try:
        model(torch.ones(2, 8)).sum().backward()
    except Exception as error:
        return str(error)
    return "nothing"
