"""A process group may be a Python class of the user's own, known to nobody but the DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp_core.facts import Facts
from tests.ddp_core.models import MEAN, Branches, grads, ones, scale, wrap
from tests.python_groups import WORKS, Around, Lonely

facts = Facts()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 2))


def train(model: Any, inner: nn.Module) -> list[Tensor]:
    """Return all gradients of three steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().sum().backward()
        seen += [p.grad.clone() for p in inner.parameters() if p.grad is not None]
        optimizer.step()
    return seen


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("works", WORKS)
def test_training_is_that_of_the_bare_module(works: str, view: bool) -> None:
    """No process group is initialised, so nothing can go through the tables of torch.distributed."""
    group, inner, bare = Lonely(works), mlp(), mlp()
    ddp = wrap(inner, process_group=group, gradient_as_bucket_view=view, bucket_cap_mb=1e-5)
    expected = train(bare, bare)
    assert len(expected) == 18
    assert all(map(torch.equal, train(ddp, inner), expected))
    assert group.calls["allgather"] == 1
    assert group.calls["broadcast"] == 1 + 3 + 1  # the model; its buffers, once a step; rank 0's buckets
    assert group.calls["allreduce"] > 3
    if works != "wrapper":
        told_by_future = ["wait"] if works == "wait alone" else ["get_future"] if works == "future alone" else []
        assert all(group.calls[how] for how in told_by_future or ("wait", "get_future"))


@pytest.mark.parametrize("works", WORKS)
def test_parameters_that_are_not_used_and_delayed_ones(works: str) -> None:
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        model = Branches()
        ddp = wrap(model, process_group=Lonely(works), **options)
        for _ in range(3):
            ddp.zero_grad()
            ddp(ones(), "a").backward()
            assert grads(model) == [[1.0], None]
    model = Branches()
    delayed = [("b.weight", model.b.weight)]
    ddp = wrap(
        model,
        process_group=Lonely(works),
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=model.a.weight,
    )
    ddp(ones()).backward()
    assert grads(model) == [[1.0], [1.0]]


@facts
def ranks_are_averaged_and_compared(rank: int) -> None:
    assert dist.group.WORLD is not None
    group = Around(dist.group.WORLD)
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}):
        model = Branches()
        nn.init.constant_(model.a.weight, rank)
        ddp = wrap(model, process_group=group, **options)
        assert model.a.weight.item() == 0
        for _ in range(3):
            ddp.zero_grad()
            ddp(ones(rank)).backward()
            assert grads(model) == [[MEAN], [MEAN]]
    assert {"allreduce", "broadcast", "allgather"} <= group.calls.keys()
    with pytest.raises(RuntimeError, match=r"\[1\]: params\[0\] \('weight'\) with sizes \(1, 2\)"):
        wrap(nn.Linear(1 + rank, 1), process_group=group)


@facts
def ranks_may_run_out_of_data(rank: int) -> None:
    """``Join`` itself looks the group up in the tables of torch.distributed."""
    from tests.python_groups import made_by_torch

    group, model = made_by_torch("around"), scale()
    for divide_by_all in (True, False):
        ddp = wrap(model, process_group=group)
        with ddp.join(divide_by_initial_world_size=divide_by_all):
            for _ in range(1 + rank):
                ddp.zero_grad()
                ddp(ones(rank)).backward()
        if rank == 1:
            assert grads(model) == [[1.0 if divide_by_all else 2.0]]


test = facts.tests()
