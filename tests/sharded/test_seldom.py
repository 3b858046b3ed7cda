"""DiLoCo over shards: two sites, each with a model that FSDP2 shards over its two ranks."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
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


class Orthogonal(torch.optim.Optimizer):
    """Takes one step towards orthogonal gradients: of whole matrices, of this rank's rows, or of sums over them."""

    def __init__(self, parameters: Any, of: str) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.of = of

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None and p.dim() == 2:
                held, g = (p, p.grad) if self.of == "whole matrices" else (p.to_local(), p.grad.to_local())
                gram = g.mT @ g
                if self.of == "sums":
                    dist.all_reduce(gram, group=p.device_mesh.get_group())
                held.sub_(0.01 * (1.5 * g - 0.5 * g @ gram))


def warned(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in caught if "treats this rank's piece" in str(one.message)]


@facts
def optimizers_that_take_pieces_for_matrices_are_warned_of_once_by_rank_0(rank: int) -> None:
    """Not those that are given DTensors, add up products over ranks, or compute each element by itself."""

    def shards_watched(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        model = sharded_in_its_site()
        attachment = commhooks.attach_sharded(model, "all-reduce")
        optimizer = optimizer_of(model)
        attachment.watch(optimizer)
        train(model, optimizer, rank, 0, 2)
        attachment.close()

    def seldom(inner: Callable[[nn.Module], torch.optim.Optimizer], outer: Any) -> None:
        model = sharded_in_its_site()
        optimizer = inner(model)
        made = commhooks.DiLoCo(
            model, optimizer, every=2, fragments=2, outer=outer, process_group=sites().get_group("replicas")
        )
        steps(model, optimizer, made, 0, 3)
        made.close()

    whole, pieces, sums = (functools.partial(_orthogonal, of=of) for of in ("whole matrices", "pieces", "sums"))
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    outer = functools.partial(Orthogonal, of="whole matrices")
    first, second = (
        "'first.weight', 33 x 20, as the whole matrix, which is 65 x 20",
        "'second.wide.weight', 65 x 65, as",
    )
    for run, expected, parts in (
        (functools.partial(shards_watched, adamw), 0, ()),
        (functools.partial(shards_watched, whole), 0, ()),
        (functools.partial(shards_watched, sums), 0, ()),
        (functools.partial(shards_watched, pieces), rank in (0, 2), (first, "not with to_local()")),
        (functools.partial(seldom, whole, sgd), 0, ()),
        (functools.partial(seldom, pieces, sgd), rank == 0, (first, "not with to_local()")),
        (functools.partial(seldom, adamw, outer), rank == 0, (second, "such as SGD")),
    ):
        told = warned(run)
        assert len(told) == expected and all(part in one for one in told for part in parts), told


def _orthogonal(model: nn.Module, of: str) -> torch.optim.Optimizer:
    return Orthogonal(model.parameters(), of)


test_on_four_ranks = facts.tests()
