"""Every kind of graph that autograd can build between a parameter and a loss."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import bounds
from tests.ddp_core.facts import Facts
from tests.ddp_core.models import MEAN, Branches, Outputs, grads, ones, scale, wrap

facts = Facts(backend="gloo in turn")  # some hooks sum sparse gradients as Gloo does

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    """A container that is no pytree."""

    first: Tensor
    second: Tensor


class Own:
    """A container that nobody can look into."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second


CONTAINERS: dict[str, Any] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, [b]],
    "dict": lambda a, b: {"first": a, "second": {"nested": (b,)}},
    "ordered": lambda a, b: OrderedDict(first=a, second=b),
    "named": Pair,
    "dataclass": Record,
}


def total(outputs: Any) -> Tensor:
    """Return the sum of all outputs, wherever they are."""
    if isinstance(outputs, Tensor):
        return outputs.sum()
    inside = vars(outputs) if isinstance(outputs, (Record, Own)) else outputs
    values = inside.values() if isinstance(inside, dict) else inside
    return torch.stack([total(value) for value in values]).sum()


@facts
def outputs_are_found_in_every_container(rank: int) -> None:
    modes: tuple[dict[str, bool], ...] = ({}, {"find_unused_parameters": True}, {"static_graph": True})
    for (name, container), options in itertools.product(CONTAINERS.items(), modes):
        ddp = wrap(Outputs(container), **options)
        for _ in range(3):
            ddp.zero_grad()
            total(ddp(ones(rank))).backward()
            assert grads(ddp) == [[MEAN], [MEAN]], (name, options)


@facts
def a_static_graph_whose_outputs_nobody_can_see_is_an_error_not_a_divergence(rank: int) -> None:
    ddp = wrap(Outputs(Own), static_graph=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    before = ddp.module.a.weight.item()
    outputs = ddp(ones(rank))
    (outputs.first + outputs.second).sum().backward()
    with pytest.raises(RuntimeError, match="static_graph=True: .*not through the outputs"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="static_graph=True: .*not through the outputs"):
        ddp(ones(rank))
    assert ddp.module.a.weight.item() == before


@facts
def a_parameter_unused_on_one_rank_gets_the_others_half(rank: int) -> None:
    for view in (False, True):
        ddp = wrap(Branches(), find_unused_parameters=True, gradient_as_bucket_view=view)
        for step in range(4):
            ddp.zero_grad()
            ddp(ones(rank), "ab" if (rank + step) % 2 else "a").backward()
            assert grads(ddp) == [[MEAN], [1.0 if step % 2 == 0 else 0.5]]


@facts
def a_parameter_unused_on_every_rank_keeps_its_gradient(rank: int) -> None:
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        ddp = wrap(Branches(), **options)
        ddp.module.b.weight.grad = torch.full((1, 1), 7.0 + rank)
        for count in range(1, 4):
            ddp(ones(rank), "a").backward()
            assert grads(ddp) == [[count * MEAN], [7.0 + rank]], options
        ddp.zero_grad()
        ddp(ones(rank), "a").backward()
        assert grads(ddp) == [[MEAN], None]


@facts
def a_static_graph_may_leave_parameters_out(rank: int) -> None:
    for view in (False, True):
        ddp = wrap(Branches(), static_graph=True, gradient_as_bucket_view=view)
        for _ in range(4):
            ddp.zero_grad()
            ddp(ones(rank), "a" if rank == 0 else "ab").backward()
            assert grads(ddp) == [[MEAN], [1.0]]


class Checkpointed(nn.Module):
    """Runs its two weights, twice, under checkpoints of one form."""

    def __init__(self, reentrant: bool, times: int) -> None:
        super().__init__()
        self.a, self.b = scale(), scale()
        self.reentrant, self.times = reentrant, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for layer in (self.a, self.b):
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@facts
def checkpoints_of_both_forms_give_what_local_training_gives(rank: int) -> None:
    for reentrant, times, options in (
        (False, 1, {}),
        (False, 2, {}),
        (False, 2, {"find_unused_parameters": True}),
        (False, 2, {"static_graph": True}),
        (True, 1, {}),
        (True, 1, {"static_graph": True}),
        (True, 3, {"static_graph": True}),
        (True, 3, {"static_graph": True, "gradient_as_bucket_view": True}),
    ):
        torch.manual_seed(0)
        ddp = wrap(Checkpointed(reentrant, times).double(), **options)
        local = Checkpointed(False, times).double()
        local.load_state_dict(ddp.module.state_dict())
        (sum(local(ones(r).double()) for r in range(2)) / 2).sum().backward()
        for _ in range(4):
            ddp.zero_grad()
            ddp(ones(rank).double().requires_grad_()).sum().backward()
            for got, wanted in zip(ddp.parameters(), local.parameters(), strict=True):
                bounds.assert_equal_in_float64(got.grad, wanted.grad)


@facts
def a_gradient_penalty_is_averaged(rank: int) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        ddp = wrap(nn.Sequential(scale(), nn.Tanh()).double(), **options)
        weight = ddp.module[0].weight.item()
        expected = 0.0
        for r in range(2):
            w = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
            slope = w * (1 - torch.tanh(w * (r + 1)) ** 2)
            (slope**2 + torch.tanh(w * (r + 1))).backward()
            assert w.grad is not None
            expected += w.grad.item() / 2
        for _ in range(3):
            ddp.zero_grad()
            x = ones(rank).double().requires_grad_()
            y = ddp(x).sum()
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
            ((slope**2).sum() + y).backward()
            assert grads(ddp)[0] == pytest.approx([expected], rel=bounds.IN_FLOAT64), options


@facts
def torch_func_differentiates_a_wrapped_module_as_a_local_one(rank: int) -> None:
    """Nothing is averaged, as in PyTorch's class: a fresh one, one whose buckets are not rebuilt yet, a later one."""
    for steps in range(4):
        ddp = wrap(scale())

        def loss(values: dict[str, Tensor], inputs: Tensor, ddp: nn.Module = ddp) -> Tensor:
            outputs: Tensor = torch.func.functional_call(ddp, values, (inputs,))
            return outputs.sum()

        for _ in range(steps):
            ddp(ones(rank)).sum().backward()
            ddp.zero_grad()
        values = {name: parameter.detach() for name, parameter in ddp.named_parameters()}
        assert torch.func.grad(loss)(values, ones(rank))["module.weight"].tolist() == ones(rank).tolist()
        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, ones(rank)[None])
        assert per_sample["module.weight"].tolist() == ones(rank)[None].tolist()
        assert grads(ddp) == [None]
        for _ in range(3):
            ddp.zero_grad()
            ddp(ones(rank)).sum().backward()
            assert grads(ddp) == [[MEAN]]


test_on_two_ranks = facts.tests()
