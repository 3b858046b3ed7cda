"""The inner optimizer's state, averaged with the parameters or left to each rank."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import PostLocalSGDOptimizer

from commhooks import DiLoCo, ModelAverager, SettingsError
from commhooks.errors import CompressorError
from commhooks.lockstep import lockstep_connections, step_in_lockstep
from tests.commhooks.ranks import of_every_rank
from tests.commhooks.resuming import distance, roundtrip
from tests.commhooks.told import told_by
from tests.ddp_core.facts import Facts
from tests.diloco.workers import Worker, adamw, network, train_in_lockstep, workers

plain = functools.partial(torch.optim.SGD, lr=1.0)
facts = Facts(check_exit=False)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def moments(worker: Worker) -> dict[str, Any]:
    """Return a copy of the state of an optimizer, by the parameter's number."""
    return copy.deepcopy({str(key): state for key, state in worker.optimizer.state_dict()["state"].items()})


# --- what is computed -------------------------------------------------------------------------------------------------


class Quadratic(nn.Module):
    """Half the squared distance of one weight to a target."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.clone())


@pytest.mark.parametrize("optimizer_state", ["local", "mean"])
def test_post_local_sgd_with_momentum_is_a_reference_in_integers(optimizer_state: Any) -> None:
    """Bit for bit: 12 steps on small integers and powers of two are exact in fp32."""
    start, targets = torch.tensor([64.0, -32.0, 128.0]), [torch.tensor([0.0, 64.0, 32.0]), torch.tensor([128.0, 0, 0])]
    models = [Quadratic(start) for _ in targets]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5) for model in models]
    team = [
        DiLoCo(model, optimizer, every=3, outer=plain, optimizer_state=optimizer_state, connection=connection)
        for model, optimizer, connection in zip(models, optimizers, lockstep_connections(2), strict=True)
    ]
    weights, velocities = [start.double() for _ in targets], [torch.zeros(3).double() for _ in targets]
    for step in range(1, 7):
        for rank, (model, target) in enumerate(zip(models, targets, strict=True)):
            model.weight.grad = model.weight.detach() - target
            optimizers[rank].step()
            velocities[rank] = 0.5 * velocities[rank] + (weights[rank] - target.double())
            weights[rank] = weights[rank] - 0.25 * velocities[rank]
        step_in_lockstep(team)
        if step % 3 == 0:
            weights = [(weights[0] + weights[1]) / 2] * 2
            if optimizer_state == "mean":
                velocities = [(velocities[0] + velocities[1]) / 2] * 2
    for rank, model in enumerate(models):
        assert torch.equal(model.weight.detach().double(), weights[rank])
        assert torch.equal(optimizers[rank].state[model.weight]["momentum_buffer"].double(), velocities[rank])


def test_each_fragments_moments_become_their_mean_at_its_turn_mixed_as_the_parameters_are() -> None:
    """Of the time of sending, a step before the turn; the other fragment's stay. Four ranks' sums round three times."""
    team = workers(4, every=4, fragments=2, delay=1, mixing=0.25, optimizer_state="mean")
    train_in_lockstep(team, 0, 1)
    sent = [moments(worker) for worker in team]
    for worker in team:
        worker.inner_step(1)
    before = [moments(worker) for worker in team]
    step_in_lockstep([worker.diloco for worker in team])
    first = {name for name, _ in team[0].model.named_parameters() if name in team[0].diloco.schedule.fragments[0]}
    for place, (name, _) in enumerate(team[0].model.named_parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            mean = torch.stack([of_rank[str(place)][key] for of_rank in sent]).mean(0)
            for rank, worker in enumerate(team):
                own = before[rank][str(place)][key]
                expected = 0.25 * own + 0.75 * mean if name in first else own
                found = moments(worker)[str(place)][key]
                torch.testing.assert_close(found, expected, rtol=4 * 2**-23, atol=4 * 2**-23 * float(mean.abs().max()))
    assert {int(state["step"]) for worker in team for state in moments(worker).values()} == {2}


def test_a_rank_whose_state_was_not_finite_keeps_its_count_of_steps() -> None:
    """Cleared, it would count anew, and the next round would be refused."""
    team = workers(2, every=2, fragments=2, outer=plain, optimizer_state="mean")
    for step in range(6):
        for worker in team:
            Worker.gradients(worker.model, worker.rank, step)
            if (worker.rank, step) == (1, 2):
                for parameter in worker.model.parameters():
                    parameter.grad = torch.full_like(parameter, math.nan)
            worker.optimizer.step()
        step_in_lockstep([worker.diloco for worker in team])
    counts = team[1].diloco.statistics()
    assert counts.dropped_rounds == 1 and counts.cleared > 0
    assert {int(state["step"]) for worker in team for state in moments(worker).values()} == {6}
    assert all(p.isfinite().all() for worker in team for p in worker.model.parameters())


def test_what_has_no_mean_is_refused() -> None:
    (worker,) = workers(1, momentum, every=1, optimizer_state="mean")
    worker.inner_step(0)
    first = next(worker.model.parameters())
    worker.optimizer.state[first]["codes"] = torch.zeros_like(first, dtype=torch.uint8)
    with pytest.raises(
        CompressorError, match=r"'codes of 0.weight' of SGD is a tensor of torch.uint8, which has no mean"
    ):
        worker.diloco.step()
    with pytest.raises(SettingsError, match="optimizer_state='global'.*must be one of local, mean"):
        workers(1, every=1, optimizer_state="global")
    with pytest.raises(SettingsError, match="with a mixing of 1 the optimizer's state stays"):
        workers(1, every=1, mixing=1.0, optimizer_state="mean")


# --- process groups ---------------------------------------------------------------------------------------------------

STREAMING: dict[str, Any] = {"every": 6, "fragments": 3, "delay": 4, "mixing": 0.5, "optimizer_state": "mean"}


def run(worker: Worker) -> dict[str, Any]:
    return copy.deepcopy({"model": worker.model.state_dict(), "optimizer": worker.optimizer.state_dict()})


@facts
def a_run_resumes_bit_for_bit_with_moments_under_way(rank: int) -> None:
    worker = Worker(rank, **STREAMING)
    worker.train(0, 14)
    saved = roundtrip(worker.save())
    assert len(saved["diloco"]["shared"]["moments_due"]) == 2
    worker.train(14, 27)
    expected = run(worker)
    worker.diloco.close()
    resumed = Worker(rank, **STREAMING)
    resumed.load(saved)
    resumed.train(14, 27)
    assert distance(run(resumed), expected) == 0
    resumed.diloco.close()
    local = Worker(rank, **(STREAMING | {"optimizer_state": "local"}))
    told = told_by(lambda: local.diloco.load_state_dict(saved["diloco"]))
    assert "optimizer_state: saved with 'mean', now 'local'; pass settings='change'" in told.text, told
    local.diloco.close()


@facts
def ranks_that_took_unequal_steps_are_named_and_nothing_is_changed(rank: int) -> None:
    """In the first round, and in a later one, with a parameter whose count alone differs."""
    for round_ in (1, 2):
        worker = Worker(rank, every=2, optimizer_state="mean", hook_timeout=20.0)
        worker.train(0, 2 * round_ - 1)
        worker.inner_step(2 * round_ - 1)
        if rank:
            worker.optimizer.state[next(worker.model.parameters())]["step"] -= 1
        before = run(worker)
        told = told_by(worker.diloco.step)
        assert told.error == "CompressorError" and told.seconds < 10, told
        assert "must have taken equally many steps" in told.text
        assert f"step of 0.weight: {2.0 * round_} (rank 0), {2.0 * round_ - 1} (rank 1). Nothing" in told.text, told
        assert distance(run(worker), before) == 0
        assert "not taken, because each rank has trained alone" in told_by(worker.diloco.step).text
        worker.diloco.close()


@facts
def a_parameter_with_state_on_one_rank_alone_is_an_error_on_all(rank: int) -> None:
    """On all ranks it may come later, and its moments are averaged from then on."""
    for unused_on, complaint in (
        ((1,), "tensor exp_avg of 6.bias: shape (10,), torch.float32, strides (1,) (rank 0), missing (rank 1)"),
        ((0, 1), "moments of fragment 0 of 1 since 'exp_avg of 6.bias' is there"),
        ((), ""),
    ):
        worker = Worker(rank, every=2, optimizer_state="mean", hook_timeout=20.0)
        worker.diloco.step()
        worker.diloco.step()
        bias = [*worker.model.parameters()][-1]
        told = told_by(lambda: None)
        for step in range(2, 6):
            worker.gradients(worker.model, rank, step)
            if (step < 4 or (rank and complaint)) and rank in unused_on:
                bias.grad = None
            worker.optimizer.step()
            before = run(worker)
            if (told := told_by(worker.diloco.step)).error != "nothing":
                break
        assert complaint in told.text and bool(complaint) == (told.error != "nothing"), (unused_on, told)
        if complaint:
            assert distance(run(worker), before) == 0
        else:
            assert distance(*of_every_rank(moments(worker))) == 0
        worker.diloco.close()


@facts
def an_averager_averages_moments_from_the_first_average_on(rank: int) -> None:
    for optimizer_state in ("mean", "local"):
        model = network()
        local = adamw(model)
        averager = ModelAverager(model, local, every=3, warmup_steps=2, optimizer_state=optimizer_state)
        optimizer = PostLocalSGDOptimizer(local, averager)
        for step in range(6):
            Worker.gradients(model, rank, step)
            optimizer.step()
            one, other = of_every_rank({str(key): dict(state) for key, state in local.state_dict()["state"].items()})
            assert (distance(one, other) == 0) == (optimizer_state == "mean" and step in (2, 5)), step
        averager.close()


test_on_two_ranks = facts.tests()
