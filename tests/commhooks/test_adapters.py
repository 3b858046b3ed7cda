"""Fine-tuning of adapters: a frozen model with small trained matrices, several of them in turn, and passes without."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks import attach, attach_replicas, attach_sharded
from commhooks.tensors import local
from tests.commhooks.models import wrap
from tests.commhooks.ranks import of_every_rank
from tests.commhooks.told import told_by
from tests.ddp_core.facts import BOTH_DDPS, Facts
from tests.sharded.models import alone, everyone

INPUTS, WIDTH, CLASSES, RANK = 20, 64, 7, 4
facts = Facts()


class Adapted(nn.Module):
    """A frozen layer and its adapters, by name; DoRA's have a magnitude for each output too."""

    def __init__(self, layer: nn.Linear, names: tuple[str, ...], *, magnitudes: bool = False) -> None:
        super().__init__()
        self.base = layer.requires_grad_(False)
        outputs, inputs = layer.weight.shape
        self.down = nn.ParameterDict({name: torch.randn(RANK, inputs) / inputs**0.5 for name in names})
        self.up = nn.ParameterDict({name: torch.zeros(outputs, RANK) for name in names})
        norms = layer.weight.norm(dim=1)
        self.magnitude = nn.ParameterDict({name: norms.clone() for name in names if magnitudes})
        self.active = names[0]

    def forward(self, x: Tensor) -> Tensor:
        if not self.active:
            return self.base(x)  # type: ignore[no-any-return]  # nn.Linear's
        down, up = self.down[self.active], self.up[self.active]
        if not self.magnitude:
            y: Tensor = self.base(x) + x @ down.T @ up.T
            return y
        weight = self.base.weight + up @ down
        scale = self.magnitude[self.active] / weight.norm(dim=1).detach()
        return nn.functional.linear(x, scale.unsqueeze(1) * weight, self.base.bias)


class Network(nn.Sequential):
    """Two layers with adapters, and a last one that is trained as a whole."""

    def __init__(self, *names: str, **settings: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, WIDTH)]
        first, second = (Adapted(layer, names or ("one",), **settings) for layer in layers)
        super().__init__(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    @property
    def adapted(self) -> list[Adapted]:
        return [layer for layer in self if isinstance(layer, Adapted)]

    def use(self, name: str, *, train: tuple[str, ...] = ()) -> None:
        """Compute with one adapter, and freeze the others unless they are named."""
        for layer in self.adapted:
            layer.active = name
            for kind in (layer.down, layer.up, layer.magnitude):
                for key, parameter in kind.items():
                    parameter.requires_grad_(key in (train or (name,)))

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Compute without any, and freeze all meanwhile, as libraries of adapters do."""
        before, last = self.adapted[0].active, self[4]
        self.use("")
        last.requires_grad_(False)
        yield
        self.use(before)
        last.requires_grad_(True)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, INPUTS, generator=generator)
    return inputs, inputs[:, :CLASSES].argmax(dim=1)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.cross_entropy(model(inputs), targets)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def sharded(model: Network, mesh: DeviceMesh, **settings: Any) -> Network:
    for module in (*model.adapted, model):
        fully_shard(module, mesh=mesh, **settings)
    return model


def attached(way: str, compressor: str, model: Network, **settings: Any) -> tuple[nn.Module, commhooks.Handle[Any]]:
    """Return what to call, a wrapper or the sharded model, and the handle."""
    if way == "attach_sharded":
        return model, attach_sharded(sharded(model, everyone()), compressor, **settings)
    if way == "attach_replicas":
        return model, attach_replicas(sharded(model, alone()["shards"]), compressor, **settings)
    ddp = wrap(way, model, **settings)
    return ddp, attach(ddp, compressor)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    loss_of(model, rank, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def refer(model: Network, called: nn.Module, rank: int, number: int) -> float:
    """Return the loss without adapters, as DPO needs it."""
    with torch.no_grad(), model.without_adapters():
        return loss_of(called, rank, number).item()


def kept_by(model: nn.Module) -> dict[str, Tensor]:
    return {name: local(parameter).detach().clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def in_turn(way: str, compressor: str, rank: int, numbers: list[int], **settings: Any) -> dict[str, Tensor]:
    """Train "one" in odd steps and "two" in even ones; return the adapters, on which ranks must agree."""
    model = Network("one", "two")
    model[4].requires_grad_(False)
    if not settings:  # only one of them
        model.use(NAMES[numbers[0]])
    called, handle = attached(way, compressor, model, **settings)
    optimizer = adamw(model)
    handle.watch(optimizer)
    for number in numbers:
        model.use(NAMES[number])
        step(called, optimizer, rank, number)
    handle.close()
    kept = kept_by(model)
    assert all(same(kept, other) for other in of_every_rank(kept))
    return kept


NAMES = ["two", "one"] * 2
"""The adapter of each step."""


@facts
def adapters_trained_in_turn_become_what_each_becomes_alone(rank: int) -> None:
    """So does what the compressor keeps of the one that rests; a wrapper that was made while one was frozen says so."""
    for way, compressor in zip(BOTH_DDPS, ("int8:stochastic=false", "top-k"), strict=True):
        both = in_turn(way, compressor, rank, [*range(4)], find_unused_parameters=True)
        for first, name in enumerate(("two", "one")):
            only = in_turn(way, compressor, rank, [*range(first, 4, 2)])
            assert not [key for key in both if key.endswith(name) and not torch.equal(both[key], only[key])]
        told = told_by(lambda: in_turn(way, compressor, rank, [0, 1]))  # noqa: B023  # called at once
        assert told.error == "NotAveragedError" and "up.one" in told.text, told.text
        assert "while all require a gradient, with find_unused_parameters=True" in told.text


@facts
def a_pass_without_adapters_changes_nothing(rank: int) -> None:
    """Neither before a step nor between its forward and its backward pass; with DoRA, and a last layer that trains."""
    for way in (*BOTH_DDPS, "attach_sharded", "attach_replicas"):
        found = []
        for refers in (False, True):
            model = Network(magnitudes=True)
            called, handle = attached(way, "int8", model)
            optimizer = adamw(model)
            handle.watch(optimizer)
            for number in range(3):
                other = refer(model, called, rank, number) if refers else 0.0
                loss = loss_of(called, rank, number)
                again = refer(model, called, rank, number) if refers else 0.0
                assert other == again
                (loss - again).backward()
                optimizer.step()
                optimizer.zero_grad()
            handle.close()
            found.append(kept_by(model))
        assert same(*found), way
        assert way == "attach_sharded" or all(same(found[0], one) for one in of_every_rank(found[0])), way


class Packed(nn.Linear):
    """A layer whose weight holds codes of 8 bits, four of them in the memory of an fp32 number."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.load_state_dict(layer.state_dict())
        codes = (layer.weight.detach() * 100).round().to(torch.int8)
        self.weight = nn.Parameter(codes.view(-1).view(torch.float32).view(-1, 1), requires_grad=False)
        self.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(-1).view(torch.int8).view(self.out_features, self.in_features)
        return nn.functional.linear(x, weight / 100, self.bias)


@facts
def a_frozen_base_that_is_coded_already_is_not_gathered_as_codes(rank: int) -> None:
    model = Network()
    for layer in model.adapted:
        layer.base = Packed(layer.base)
    codes = [layer.base.weight for layer in model.adapted]
    before = [one.view(torch.int32).clone() for one in codes]  # some are NaN as fp32
    told = told_by(lambda: attach_sharded(sharded(copy.deepcopy(model), everyone()), "int8", gather="int8"))
    assert "'0.base.weight', of shape (320, 1), holds codes of its layer's weights" in told.text, told.text
    handle = attach_sharded(sharded(model, everyone(), ignored_params=set(codes)), "int8", gather="int8")
    optimizer, first = adamw(model), loss_of(model, rank, 0).item()
    for _ in range(6):
        step(model, optimizer, rank, 0)
    assert loss_of(model, rank, 0).item() < 0.7 * first
    handle.close()
    for layer, own, value in zip(model.adapted, codes, before, strict=True):
        assert layer.base.weight is own and torch.equal(own.view(torch.int32), value)


test_on_two_ranks = facts.tests()
