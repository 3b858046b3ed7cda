"""Local SGD with PyTorch's classes, on both DDPs, and with averages that are compressed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import commhooks
from commhooks import DiLoCo, ModelAverager, SettingsError
from commhooks.unwrapping import bare
from tests.commhooks.models import wrap
from tests.commhooks.resuming import distance
from tests.commhooks.told import told_by
from tests.ddp_core.facts import Facts
from tests.diloco.workers import Worker, adamw, network
from tests.world import on_ranks, run_world

WARMUP = 4
facts = Facts(check_exit=False)


def states_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return every rank's model."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, dict(bare(model).state_dict()))
    return states


def post_local_sgd(rank: int, kind: str, averager: str) -> list[dict[str, Any]]:
    """Train 17 steps: average all ranks' gradients, then those of two, and models by `averager`."""
    subgroup, _ = dist.new_subgroups(2)
    model: Any = wrap(kind, network())
    make_state: Any = post_local.PostLocalSGDState  # it has no types
    state = make_state(process_group=None, subgroup=subgroup, start_localSGD_iter=WARMUP)
    model.register_comm_hook(state, post_local.post_localSGD_hook)
    local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hierarchical: Any = HierarchicalModelAverager  # it has no types either
    makers: dict[str, Callable[[], Any]] = {
        "periodic": lambda: PeriodicModelAverager(period=3, warmup_steps=WARMUP),
        "hierarchical": lambda: hierarchical({2: 2, 4: 4}, warmup_steps=WARMUP),
        "ours": lambda: ModelAverager(model, local, every=3, warmup_steps=WARMUP),
        "int4": lambda: ModelAverager(model, local, every=3, warmup_steps=WARMUP, compressor="int4"),
    }
    made = makers[averager]()
    optimizer = PostLocalSGDOptimizer(local, made)
    for step in range(17):  # the last one averages
        Worker.gradients(model, rank, step)
        optimizer.step()
    states = states_of(model)
    if isinstance(made, ModelAverager):
        assert made.statistics().rounds == (17 - WARMUP - 1) // 3
        made.close()
    return states


RUNS = [("core", "periodic"), ("torch", "periodic"), ("core", "hierarchical"), ("torch", "hierarchical")]
RUNS += [("core", "ours"), ("core", "int4")]


def all_runs(rank: int) -> list[list[dict[str, Any]]]:
    return [post_local_sgd(rank, kind, averager) for kind, averager in RUNS]


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return every rank's model after each of the runs, in one world of four ranks."""
    of_rank_0, *_ = run_world(all_runs, 4, check_exit=False)
    return dict(zip(RUNS, of_rank_0, strict=True))


@pytest.mark.parametrize("averager", ["periodic", "hierarchical"])
def test_pytorchs_post_local_sgd_runs_on_both_ddps_alike(models: Any, averager: str) -> None:
    """Bit for bit, on four ranks in two groups."""
    ours, theirs = models["core", averager], models["torch", averager]
    assert distance(ours, theirs) == 0
    assert max(distance(ours[0], state) for state in ours) == 0, "the last step averages"


@pytest.mark.parametrize(("averager", "allowed"), [("ours", 17 * 5 * 2**-24), ("int4", 0.3 / 14)])
def test_averages_of_differences_are_pytorchs_averages_of_weights(models: Any, averager: str, allowed: float) -> None:
    """Up to five roundings a step of elements below 1; or half a step of int4, a seventh of the largest difference."""
    theirs, ours = models["core", "periodic"], models["core", averager]
    assert max(distance(ours[0], state) for state in ours) == 0
    assert 0 < distance(ours[0], theirs[0]) < allowed
    assert 0.1 < distance(theirs[0], dict(network().state_dict())) < 1


@on_ranks(2)
def test_an_averager_resumes_bit_for_bit_and_needs_its_own_state(rank: int, tmp_path: Path) -> None:
    def begin() -> tuple[nn.Module, PostLocalSGDOptimizer, ModelAverager]:
        model = network()
        local = adamw(model)
        averager = ModelAverager(model, local, every=5, warmup_steps=WARMUP, compressor="top-k")
        return model, PostLocalSGDOptimizer(local, averager), averager

    def train(model: nn.Module, optimizer: PostLocalSGDOptimizer, first: int, last: int) -> None:
        for step in range(first, last):
            Worker.gradients(model, rank, step)
            optimizer.step()

    model, optimizer, averager = begin()
    train(model, optimizer, 0, 12)
    commhooks.save_checkpoint(tmp_path, step=12, model=model, optimizer=optimizer, hooks=averager)
    train(model, optimizer, 12, 20)
    expected = [dict(model.state_dict()), averager.state_dict()["groups"]["fragment 0 of 1"]["local"]]
    averager.close()

    model, optimizer, averager = begin()
    commhooks.load_checkpoint(tmp_path, model=model, optimizer=optimizer, hooks=averager)
    assert averager.step == 12
    train(model, optimizer, 12, 20)
    found = [dict(model.state_dict()), averager.state_dict()["groups"]["fragment 0 of 1"]["local"]]
    assert distance(found, expected) == 0
    saved = optimizer.state_dict()
    averager.close()

    model, optimizer, averager = begin()
    optimizer.load_state_dict(saved)
    told = told_by(lambda: train(model, optimizer, 20, 21))
    assert "its last average is of another run: load its own state too" in told.text
    averager.close()
    other = ModelAverager(model, optimizer.optim, every=5, warmup_steps=1, compressor="top-k")
    told = told_by(lambda: commhooks.load_checkpoint(tmp_path, model=model, optimizer=optimizer, hooks=other))
    assert "warmup_steps: saved with 4, now 1" in told.text
    other.close()


@facts
def a_rank_that_is_not_finite_does_not_count_in_the_first_average(rank: int) -> None:
    """Otherwise all ranks would begin with NaN, and drop every round from then on."""
    for spoilt in ([1], [0, 1]):
        model = network()
        optimizer = adamw(model)
        averager = ModelAverager(model, optimizer, every=2)
        Worker.gradients(model, rank, 0)
        if rank in spoilt:
            next(model.parameters()).grad.view(-1)[0] = math.nan  # type: ignore[union-attr]  # None has no view
        optimizer.step()
        if spoilt == [0, 1]:
            told = told_by(lambda averager=averager, model=model: averager.average_parameters(model.parameters()))  # type: ignore[misc]
            assert "on every rank, parameters are not finite" in told.text
            averager.close()
            return
        averager.average_parameters(model.parameters())
        expected = network()
        own = adamw(expected)
        Worker.gradients(expected, 0, 0)
        own.step()
        assert distance(dict(model.state_dict()), dict(expected.state_dict())) == 0, "rank 0's"
        assert distance(averager.model_state(), dict(model.state_dict())) == 0, "progress counts from there"
        for step in range(1, 5):
            Worker.gradients(model, rank, step)
            optimizer.step()
            averager.average_parameters(model.parameters())
        counts = averager.statistics()
        assert (counts.rounds, counts.dropped_rounds, counts.cleared) == (2, 0, rank)
        averager.close()


@facts
def an_averager_refuses_what_pytorchs_leaves_out_without_a_word(rank: int) -> None:
    """PyTorch's average nothing after `zero_grad()`, and fewer parameters on ranks that do not use some."""
    for settings, complaint in ({"every": 0}, "every must be"), ({"every": 2, "warmup_steps": 1.5}, "warmup_steps=1.5"):
        model = network()
        with pytest.raises(SettingsError, match=complaint):
            ModelAverager(model, adamw(model), **settings)
    model = network()
    optimizer = adamw(model)
    averager = ModelAverager(model, optimizer, every=1)
    for step in range(2):
        Worker.gradients(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        averager.average_parameters(model.parameters())
    one, other = states_of(model)
    assert distance(one, other) == 0
    given: list[Any] = list(model.parameters()) if rank == 0 else []
    told = told_by(lambda: averager.average_parameters(given))
    assert "rank 1: average_parameters was given 0 parameters, which must be the 8 of the model" in told.text, told


class ScheduleFree(torch.optim.SGD):
    """Trains at one point and is evaluated at another, for which it keeps a third one on each rank."""

    def train(self) -> None:
        """Move the parameters to the point of training."""

    def eval(self) -> None:
        """Move them to the point of evaluation."""


@facts
def an_optimizer_with_a_point_of_its_own_for_evaluation_is_refused(rank: int) -> None:
    """Schedule-free optimizers keep part of it on each rank, so that models end 1 to 2 % apart in evaluation."""
    for make in (ModelAverager, DiLoCo):
        model = network()
        told = told_by(lambda make=make, model=model: make(model, ScheduleFree(model.parameters(), lr=0.1), every=2))  # type: ignore[misc]
        assert told.error == "SettingsError" and "ScheduleFree has train() and eval()" in told.text, told
        assert "use an optimizer whose parameters are evaluated as they are" in told.text


test_on_two_ranks = facts.tests()
