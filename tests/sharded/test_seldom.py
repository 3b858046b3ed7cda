"""DiLoCo over shards: two sites, each with a model that FSDP2 shards over its two ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks import SettingsError
from commhooks.tensors import cloned
from tests.sharded.models import Network, adamw, batch, shards, train
from tests.world import on_ranks

STEPS, EVERY = 12, 4


def sites() -> DeviceMesh:
    """Return the mesh of two sites with two ranks each."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("site", "shard"))


def sharded_in_its_site(mesh: DeviceMesh) -> Network:
    """Return the network, sharded within a site."""
    model = Network()
    for module in (model.first, model.second["wide"], model):
        fully_shard(module, mesh=mesh["shard"])
    return model


def diloco(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> tuple[torch.optim.Optimizer, commhooks.DiLoCo]:
    """Return an optimizer, and DiLoCo between the sites."""
    optimizer = adamw(model)
    given = {"every": EVERY, "fragments": 2, "delay": 1, "process_group": mesh.get_group("site")}
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


@on_ranks(4)
def test_shards_end_where_whole_models_do_and_resume_and_stay_together(rank: int) -> None:
    mesh = sites()
    expected_model = nn.parallel.DistributedDataParallel(
        Network(), process_group=mesh.get_group("shard"), find_unused_parameters=True
    )
    expected_run = diloco(expected_model, mesh)
    model = sharded_in_its_site(mesh)
    run = diloco(model, mesh)
    for first in range(STEPS):
        for either, its_run in ((expected_model, expected_run), (model, run)):
            steps(either, *its_run, first, first + 1)
        if first % 5 == 2:  # once with a fragment under way, and once without
            assert torch.equal(outputs(model, run[1]), outputs(expected_model, expected_run[1]))
    same(whole(model), whole(expected_model))
    same({name: p.full_tensor() for name, p in run[1].model_state().items()}, expected_run[1].model_state())

    for compressor in ("int8", "powersgd(rank=2)"):
        one = sharded_in_its_site(mesh)
        straight = diloco(one, mesh, compressor=compressor)
        steps(one, *straight, 0, 7)
        states = (
            [p.detach().clone() for p in one.parameters()],
            cloned(straight[0].state_dict()),
            straight[1].state_dict(),
        )
        steps(one, *straight, 7, 13)
        other = sharded_in_its_site(mesh)
        resumed = diloco(other, mesh, compressor=compressor)
        with torch.no_grad():
            for parameter, saved in zip(other.parameters(), states[0], strict=True):
                parameter.copy_(saved)
        resumed[0].load_state_dict(states[1])
        resumed[1].load_state_dict(states[2])
        steps(other, *resumed, 7, 13)
        same(shards(other), shards(one))

    one_of_four_is_not_finite(rank, mesh)


def one_of_four_is_not_finite(rank: int, mesh: DeviceMesh) -> None:
    """Spoil one element on one rank: the round is dropped on all four, not on the two that average it."""
    model = sharded_in_its_site(mesh)
    optimizer, own = diloco(model, mesh, fragments=1, delay=0)
    steps(model, optimizer, own, 0, EVERY)
    before = own.model_state()
    steps(model, optimizer, own, EVERY, 2 * EVERY - 1)
    train(model, optimizer, rank, 2 * EVERY - 1, 2 * EVERY)
    if rank == 3:
        spoiled: Any = model.first.weight
        spoiled.detach().to_local()[0, 0] = math.inf
    with pytest.warns(UserWarning, match="round 1 of .* was dropped"):
        own.step()
    same(shards(model), {name: before[name].to_local() for name in shards(model)})
    assert own.statistics().dropped_rounds == 1

    optimizer, own = diloco(model := sharded_in_its_site(mesh), mesh)
    own.close()
    with torch.no_grad():
        model(batch(0, 999)[0])  # after which the root's parameters stay gathered
    commhooks.DiLoCo(model, optimizer, every=EVERY, process_group=mesh.get_group("site")).close()
    for wrong, words in (
        ({"process_group": None}, r"ranks \[0, 1\]|ranks \[2, 3\]"),
        ({"process_group": mesh.get_group("shard")}, "keep parts"),
    ):
        with pytest.raises(SettingsError, match=words):
            diloco(sharded_in_its_site(mesh), mesh, **wrong)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
