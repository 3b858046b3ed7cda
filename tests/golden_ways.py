"""Every way in, trained as a user would: what `tests/golden.py` takes digests of.

This file alone knows how things are called and where a saved state has its entries, so that it may follow new names
and layouts. What it returns may not change: values, and bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SHAPES = [(64, 48), (48,), (40, 3, 3, 3), (5,), (0, 4), (), (30, 40), (7, 1), (1, 90), (33, 65)]
STEPS = 40
POLICIES = ("fifo", "fused")
COMPRESSORS = ("all-reduce", "fp16", "powersgd:rank=2", "top-k:ratio=0.1", "int8", "sign")


@dataclasses.dataclass
class Run:
    """What one way in computed on one rank."""

    means: list[list[Tensor]] = dataclasses.field(default_factory=list)
    """After each step the gradients, or else the parameters."""
    state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """What it saved at the end, by place, parameter and name."""
    traffic: list[int] = dataclasses.field(default_factory=list)
    """Collectives, payload elements, payload bytes and moved bytes."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way in: its rows by name, and the worlds in which they train."""

    train: Callable[[int, Any, str], Run]
    """Trains on a rank, with a row and under a policy."""
    rows: Callable[[], Mapping[str, Any]]
    worlds: tuple[int, ...] = (2,)
    policies: tuple[str, ...] = POLICIES


LAYOUT = re.compile(r"groups|replicated|local|rank\d+")
"""What a place in a saved state says of the layout, and not of what is saved there."""


def entries_of(saved: Any) -> dict[str, Tensor]:
    """Return the tensors of a saved state by group, parameter and name."""
    found: dict[str, Tensor] = {}
    for place, tensor in _entries(saved, ()):
        key = ", ".join(part for part in place if not LAYOUT.fullmatch(part))
        assert key not in found, f"two entries are called {key}"
        found[key] = tensor
    return found


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a saved state, in order."""
    return (tensor for _, tensor in _entries(value, ()))


def _entries(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _entries(one, (*place, str(name)))
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _entries(one, (*place, str(number)))


def counted(statistics: Any) -> list[int]:
    """Return what was sent."""
    statistics = getattr(statistics, "traffic", statistics)  # DiLoCo counts rounds, too
    return [
        statistics.collectives, statistics.payload_elements, statistics.payload_bytes, statistics.moved_bytes
    ]  # fmt: skip


# --- data parallel ----------------------------------------------------------------------------------------------------


def cases() -> Mapping[str, Any]:
    """Return every row of the table."""
    return {case.name: case for case in importlib.import_module("tests.cases").CASES}


def forms() -> Mapping[str, Any]:
    """Return a row of each form."""
    return {name: case for name, case in cases().items() if importlib.import_module("tests.cases").is_form(case)}


def attached(ddp: str) -> Callable[[int, Any, str], Run]:
    """Return the training with `attach` on one of the two classes."""

    def train(rank: int, case: Any, policy: str) -> Run:
        import commhooks

        model, module = given(ddp)
        handle = commhooks.attach(model, case.make(), policy=policy)  # type: ignore[arg-type]
        run = with_gradients(rank, model, module)
        run.traffic, run.state = counted(handle.statistics()), entries_of(handle.state_dict())
        handle.close()
        return run

    return train


STATES: dict[str, dict[str, Any]] = {
    "rank 1": {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2},
    "rank 4": {"matrix_approximation_rank": 4, "start_powerSGD_iter": 10},
    "cold, without feedback": {
        "matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "use_error_feedback": False, "warm_start": False
    },
    "same shapes at once": {
        "matrix_approximation_rank": 2, "start_powerSGD_iter": 3, "batch_tensors_with_same_shape": True
    },
}  # fmt: skip


def registered(ddp: str) -> Callable[[int, Any, str], Run]:
    """Return the training with PyTorch's own call: a PowerSGDState and its hook."""

    def train(rank: int, settings: Any, _policy: str) -> Run:
        import commhooks

        model, module = given(ddp)
        state = commhooks.PowerSGDState(None, **settings)
        if ddp == "torch":  # it gives a hook no names
            state.bind(model)
        model.register_comm_hook(state, commhooks.powerSGD_hook)
        run = with_gradients(rank, model, module)
        run.traffic, run.state = counted(state.statistics()), entries_of(state.state_dict())
        return run

    return train


def given(ddp: str) -> tuple[Any, nn.Module]:
    """Return a wrapped model of parameters that are given their gradients, and its module."""
    models = importlib.import_module("tests.commhooks.models")
    module = models.Given(*SHAPES)
    return models.wrap(ddp, module, bucket_cap_mb=0.02), module


def with_gradients(rank: int, model: Any, module: nn.Module) -> Run:
    """Give the parameters their gradients; return the means of all steps."""
    run = Run()
    for step in range(STEPS):
        model.zero_grad()
        model(*gradients(rank, step)).backward()
        run.means.append(copies(p.grad for p in module.parameters()))
    return run


def gradients(rank: int, step: int) -> list[Tensor]:
    """Return a rank's gradients in a step, one of each shape."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def exchanged(rank: int, case: Any, policy: str) -> Run:
    """Average tensors without a model."""
    import commhooks

    named = {f"tensor {number}": torch.zeros(shape) for number, shape in enumerate(SHAPES)}
    exchanger = commhooks.Exchanger(named, case.make(), policy=policy)  # type: ignore[arg-type]
    run = Run()
    for step in range(STEPS):
        means = dict(zip(named, gradients(rank, step), strict=True))
        exchanger.average(means)
        run.means.append(copies(means.values()))
    run.traffic, run.state = counted(exchanger.statistics()), entries_of(exchanger.state_dict())
    exchanger.close()
    return run


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def by_name(of_blocks: bool = False) -> Mapping[str, Any]:
    """Return compressors by their names, or only those that compress a shard alone."""
    return {name: name for name in COMPRESSORS if not of_blocks or not name.startswith("powersgd")}


def shared(rank: int, compressor: str, _policy: str) -> Run:
    """Shard a model over all ranks."""
    from commhooks import attach_sharded

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded(mesh)
    attachment = attach_sharded(model, compressor)
    run = trained(rank, model, attachment)
    attachment.close()
    return run


def replicated(rank: int, compressor: str, policy: str) -> Run:
    """Shard a model over half of the ranks, and average it with the other half."""
    from commhooks import attach_replicas

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    model = sharded(mesh["shards"])
    group = mesh["replicas"].get_group()
    attachment = attach_replicas(model, compressor, process_group=group, policy=policy)  # type: ignore[arg-type]
    run = trained(rank, model, attachment)
    attachment.close()
    return run


def sharded(mesh: Any) -> nn.Module:
    """Return three layers, of which FSDP2 shards each, and the root."""
    model = network()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return model


# --- low communication ------------------------------------------------------------------------------------------------

ROUNDS: dict[str, dict[str, Any]] = {
    **{f"whole, {compressor}": {"every": 6, "compressor": compressor} for compressor in COMPRESSORS},
    "fragments": {"every": 6, "fragments": 3, "delay": 4, "mixing": 0.5, "compressor": "int4"},
    "SparseLoCo": {"every": 5, "compressor": "sparse-loco"},
}


def diloco(rank: int, settings: Any, _policy: str) -> Run:
    """Train apart, and average what was moved."""
    from commhooks import DiLoCo

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rounds = DiLoCo(model, optimizer, **settings)
    run = trained(rank, model, rounds, optimizer, rounds.step)
    rounds.close()
    return run


def averaged(rank: int, compressor: str, _policy: str) -> Run:
    """Train apart, and average the parameters."""
    from torch.distributed.optim import PostLocalSGDOptimizer

    from commhooks import ModelAverager

    model = network()
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = ModelAverager(model, local, every=3, warmup_steps=4, compressor=compressor)
    optimizer = PostLocalSGDOptimizer(local, averager)
    run = trained(rank, model, averager, optimizer)
    averager.close()
    return run


def network() -> nn.Sequential:
    """Return three layers of different widths."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 65), nn.Tanh(), nn.Linear(65, 130), nn.Tanh(), nn.Linear(130, 7))


def trained(
    rank: int, model: nn.Module, handle: Any, optimizer: Any = None, after: Callable[[], object] = lambda: None
) -> Run:
    """Train a model; return its parameters after every step, and what the handle saved and counted."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        inputs, targets = torch.randn(8, 20, generator=generator), torch.randint(0, 7, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        after()
        run.means.append(copies(model.parameters()))
    run.state = entries_of(handle.state_dict())  # waits for what is under way
    run.traffic = counted(handle.statistics())
    return run


def copies(tensors: Iterable[Any]) -> list[Tensor]:
    """Return copies of tensors, of a sharded one that of this rank's shard."""
    locals_ = (one.to_local() if hasattr(one, "to_local") else one for one in tensors if one is not None)
    return [one.detach().clone() for one in locals_]


WAYS = {
    "attach, ddp_core": Way(attached("core"), cases, worlds=(1, 2, 4)),
    "attach, PyTorch's DDP": Way(attached("torch"), forms, worlds=(2, 4)),
    "PowerSGDState, ddp_core": Way(registered("core"), lambda: STATES, worlds=(2, 3), policies=("fifo",)),
    "PowerSGDState, PyTorch's DDP": Way(registered("torch"), lambda: STATES, worlds=(2, 3), policies=("fifo",)),
    "Exchanger": Way(exchanged, cases, worlds=(2, 3)),
    "attach_sharded": Way(shared, functools.partial(by_name, of_blocks=True), worlds=(2, 3), policies=("fused",)),
    "attach_replicas": Way(replicated, by_name, worlds=(4,)),
    "DiLoCo": Way(diloco, lambda: ROUNDS, worlds=(2, 3), policies=("fused",)),
    "ModelAverager": Way(averaged, by_name, worlds=(2, 3), policies=("fused",)),
}
