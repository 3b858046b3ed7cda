"""DiLoCo over shards: two sites, each with a model that FSDP2 shards over its two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
from commhooks.tensors import cloned
from tests.ddp_core.facts import Facts
from tests.sharded.models import Network, adamw, batch, furthest, sharded, shards, sites, train

STEPS, EVERY = 12, 4
facts = Facts(4, turns=["int8", "powersgd(rank=2)"])


def sharded_in_its_site() -> Network:
    """Return the network, sharded within a site."""
    return sharded(mesh=sites()["shards"])


def diloco(model: nn.Module, **settings: Any) -> tuple[torch.optim.Optimizer, commhooks.DiLoCo]:
    """Return an optimizer, and DiLoCo between the sites."""
    optimizer = adamw(model)
    given = {
        "optimizer_state": "mean",
        "every": EVERY,
        "fragments": 2,
        "delay": 1,
        "process_group": sites().get_group("replicas"),
    }
    made: Any = commhooks.DiLoCo
    return optimizer, made(model, optimizer, **{**given, **settings})


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, diloco: commhooks.DiLoCo, first: int, last: int) -> None:
    for step in range(first, last):
        train(model, optimizer, dist.get_rank(), step, step + 1)
        diloco.step()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, gathered if they are sharded."""
    named: Any = model.named_parameters()
    return {
        name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in named
    }


def outputs(model: nn.Module, diloco: commhooks.DiLoCo) -> Tensor:
    """Return what the model of the outer copies makes of one batch, and leave the run as it was."""
    with diloco.outer_parameters(), torch.no_grad():
        found: Tensor = model(batch(0, 999)[0])
        return found


@facts
def shards_end_where_whole_models_do(rank: int) -> None:
    expected_model = nn.parallel.DistributedDataParallel(
        Network(), process_group=sites().get_group("shards"), find_unused_parameters=True
    )
    expected_run = diloco(expected_model)
    model = sharded_in_its_site()
    run = diloco(model)
    for first in range(STEPS):
        for either, its_run in ((expected_model, expected_run), (model, run)):
            steps(either, *its_run, first, first + 1)
        if first % 5 == 2:  # once with a fragment under way, and once without
            assert torch.equal(outputs(model, run[1]), outputs(expected_model, expected_run[1]))
    assert furthest(whole(model), whole(expected_model)) == 0
    outer = {name: p.full_tensor() for name, p in run[1].model_state().items()}
    assert furthest(outer, expected_run[1].model_state()) == 0


@facts
def a_resumed_run_is_the_uninterrupted_one_bit_for_bit(rank: int, compressor: str) -> None:
    one, other = sharded_in_its_site(), sharded_in_its_site()
    straight = diloco(one, compressor=compressor)
    steps(one, *straight, 0, 7)
    parameters = [p.detach().clone() for p in one.parameters()]
    inner, state = cloned(straight[0].state_dict()), straight[1].state_dict()
    steps(one, *straight, 7, 13)
    resumed = diloco(other, compressor=compressor)
    with torch.no_grad():
        for parameter, saved in zip(other.parameters(), parameters, strict=True):
            parameter.copy_(saved)
    resumed[0].load_state_dict(inner)
    resumed[1].load_state_dict(state)
    steps(other, *resumed, 7, 13)
    assert furthest(shards(other), shards(one)) == 0


@facts
def if_one_element_on_one_of_four_ranks_is_not_finite_all_four_drop_the_round(rank: int) -> None:
    """Not the two alone that average it."""
    model = sharded_in_its_site()
    optimizer, own = diloco(model, fragments=1, delay=0)
    steps(model, optimizer, own, 0, EVERY)
    before = own.model_state()
    steps(model, optimizer, own, EVERY, 2 * EVERY - 1)
    train(model, optimizer, rank, 2 * EVERY - 1, 2 * EVERY)
    if rank == 3:
        spoiled: Any = model.first.weight
        spoiled.detach().to_local()[0, 0] = math.inf
    with pytest.warns(UserWarning, match="round 1 of .* was dropped"):
        own.step()
    assert furthest(shards(model), {name: before[name].to_local() for name in shards(model)}) == 0
    assert own.statistics().dropped_rounds == 1


test_on_four_ranks = facts.tests()
