"""Digests of what every compressor computes, to prove that a change of structure changes no bit.

    python tests/golden.py record before.json [WAY ...]     # in a copy of the old commit; of some ways in, or all
    python tests/golden.py record after.json [WAY ...]      # in the new one, on the same machine
    python tests/golden.py compare before.json after.json

Recorded for every way in and its rows, in several worlds and under its policies, for 40 steps: the means or parameters
after each step, the saved state entry by entry, and the bytes of every rank. What runs is the code of the current
folder; where names or layouts have changed, change them here, but not what is digested. No digest is kept in the
repository: another processor has others.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer

SHAPES = [(64, 48), (48,), (40, 3, 3, 3), (5,), (0, 4), (), (30, 40), (7, 1), (1, 90), (33, 65)]
STEPS = 40
SHOWN = 3
"""The first differences are named, and the others counted."""
COMPRESSORS = ("all-reduce", "fp16", "powersgd:rank=2", "top-k:ratio=0.1", "int8", "sign")
STATES: dict[str, dict[str, Any]] = {
    "rank 1": {"matrix_approximation_rank": 1},
    "cold": {"matrix_approximation_rank": 2, "use_error_feedback": False, "warm_start": False},
    "same shapes": {"matrix_approximation_rank": 4, "batch_tensors_with_same_shape": True},
}
ROUNDS: dict[str, dict[str, Any]] = {
    **{f"whole, {compressor}": {"every": 6, "compressor": compressor} for compressor in COMPRESSORS},
    "fragments": {"every": 6, "fragments": 3, "delay": 4, "mixing": 0.5, "compressor": "int4"},
    "SparseLoCo": {"every": 5, "compressor": "sparse-loco"},
}
LAYOUT = re.compile(r"groups|replicated|local|rank\d+")
"""What a place in a saved state says of the layout, and not of what is saved there."""

Trains = Callable[[int], Iterable[Any]]
"""Trains for a step, and returns the means, or else the parameters."""


def module(name: str) -> Any:
    """Import what belongs to the current folder, which may be another one than this script's."""
    return importlib.import_module(name)


# --- ways in: each returns what trains for a step, and what has the state and the statistics --------------------------


def attached(rank: int, case: Any, policy: str, ddp: str = "core") -> tuple[Trains, Any]:
    model = given(ddp)
    return means_of(rank, model), module("commhooks").attach(model, case.make(), policy=policy)


def attached_to_pytorchs(rank: int, case: Any, policy: str) -> tuple[Trains, Any]:
    return attached(rank, case, policy, ddp="torch")


def registered(rank: int, settings: Any, _: str) -> tuple[Trains, Any]:
    """Use PyTorch's own call: a PowerSGDState and its hook."""
    model, commhooks = given("torch"), module("commhooks")
    state = commhooks.PowerSGDState(None, start_powerSGD_iter=3, **settings)
    state.bind(model)  # PyTorch's DDP gives a hook no names
    model.register_comm_hook(state, commhooks.powerSGD_hook)
    return means_of(rank, model), state


def exchanged(rank: int, case: Any, policy: str) -> tuple[Trains, Any]:
    """Average tensors without a model."""
    named = {f"tensor {number}": torch.zeros(shape) for number, shape in enumerate(SHAPES)}
    exchanger = module("commhooks").Exchanger(named, case.make(), policy=policy)

    def step(number: int) -> Iterable[Tensor]:
        means = dict(zip(named, gradients(rank, number), strict=True))
        exchanger.average(means)
        return means.values()

    return step, exchanger


def shared(rank: int, compressor: str, _: str) -> tuple[Trains, Any]:
    """Shard a model over all ranks."""
    model = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    return parameters_of(rank, model), module("commhooks").attach_sharded(model, compressor)


def replicated(rank: int, compressor: str, policy: str) -> tuple[Trains, Any]:
    """Shard a model over half of the ranks, and average it with the other half."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    model, group = sharded(mesh["shards"]), mesh["replicas"].get_group()
    attachment = module("commhooks").attach_replicas(model, compressor, process_group=group, policy=policy)
    return parameters_of(rank, model), attachment


def diloco(rank: int, settings: Any, _: str) -> tuple[Trains, Any]:
    """Train apart, and average what was moved."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rounds = module("commhooks").DiLoCo(model, optimizer, **settings)
    return parameters_of(rank, model, optimizer, rounds.step), rounds


def averaged(rank: int, compressor: str, _: str) -> tuple[Trains, Any]:
    """Train apart, and average the parameters."""
    model = network()
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = module("commhooks").ModelAverager(model, local, every=3, warmup_steps=4, compressor=compressor)
    return parameters_of(rank, model, PostLocalSGDOptimizer(local, averager)), averager


def given(ddp: str) -> Any:
    """Return a wrapped model of parameters that are given their gradients."""
    models = module("tests.commhooks.models")
    return models.wrap(ddp, models.Given(*SHAPES), bucket_cap_mb=0.02)


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def means_of(rank: int, model: Any) -> Trains:
    def step(number: int) -> Iterable[Any]:
        model.zero_grad()
        model(*gradients(rank, number)).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    return step


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 65), nn.Tanh(), nn.Linear(65, 130), nn.Tanh(), nn.Linear(130, 7))


def sharded(mesh: Any) -> nn.Module:
    model = network()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    return model


def parameters_of(rank: int, model: nn.Module, optimizer: Any = None, after: Callable[[], object] = bool) -> Trains:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(number: int) -> Iterable[Any]:
        generator = torch.Generator().manual_seed(1000 * rank + number)
        inputs, targets = torch.randn(8, 20, generator=generator), torch.randint(0, 7, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        after()
        return (one.to_local() if hasattr(one, "to_local") else one for one in model.parameters())

    return step


class Way(NamedTuple):
    """A way in: its rows by name, and the worlds and policies in which they train."""

    begin: Callable[[int, Any, str], tuple[Trains, Any]]
    rows: Callable[[], Mapping[str, Any]]
    worlds: tuple[int, ...] = (2, 3)
    policies: tuple[str, ...] = ("fused",)


def cases() -> Mapping[str, Any]:
    return module("tests.cases").BY_NAME  # type: ignore[no-any-return]


def forms() -> Mapping[str, Any]:
    return {name: cases()[name] for name in module("tests.cases").FORMS}


def by_name() -> Mapping[str, str]:
    return {name: name for name in COMPRESSORS}


BOTH = ("fifo", "fused")
WAYS = {
    "attach, ddp_core": Way(attached, cases, (1, 2, 4), BOTH),
    "attach, PyTorch's DDP": Way(attached_to_pytorchs, forms, (2, 4), BOTH),
    "PowerSGDState": Way(registered, lambda: STATES, policies=("fifo",)),
    "Exchanger": Way(exchanged, cases, policies=BOTH),
    "attach_sharded": Way(shared, lambda: {name: name for name in COMPRESSORS if "powersgd" not in name}),
    "attach_replicas": Way(replicated, by_name, (4,), BOTH),
    "DiLoCo": Way(diloco, lambda: ROUNDS),
    "ModelAverager": Way(averaged, by_name),
}


# --- digests ----------------------------------------------------------------------------------------------------------


def record(only: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Return digests by way, row, policy and rank; of some ways, or all."""
    sys.path.insert(0, str(Path.cwd()))
    run_world, here = module("tests.world").run_world, module(Path(__file__).stem)
    found: dict[str, dict[str, str]] = {}
    for name, way in WAYS.items():
        worlds = itertools.product(way.worlds, way.policies) if not only or name in only else ()
        for ranks, policy in worlds:
            of_ranks = run_world(here.digests_of_rank, ranks, name, policy, timeout=1800.0, check_exit=False)
            for rank, of_rank in enumerate(of_ranks):
                found |= {f"{name}, {row}, {policy}, rank {rank} of {ranks}": one for row, one in of_rank.items()}
    return found


def digests_of_rank(rank: int, name: str, policy: str) -> dict[str, dict[str, str]]:
    """Train with every row of a way on this rank; return by row the digest of each step and of each entry."""
    found = {}
    for row, made_with in WAYS[name].rows().items():
        step, handle = WAYS[name].begin(rank, made_with, policy)
        digests = {f"step {number}": digest_of(step(number)) for number in range(STEPS)}
        for place, tensor in entries_in(handle.state_dict()):  # waits for what is under way
            key = ", ".join(part for part in place if not LAYOUT.fullmatch(part))
            assert key not in digests, f"two entries are called {key}"
            digests[key] = digest_of([tensor])
        sent = handle.statistics()
        sent = getattr(sent, "traffic", sent)  # DiLoCo counts rounds, too
        digests["sent"] = f"{sent.collectives} {sent.payload_elements} {sent.payload_bytes} {sent.moved_bytes}"
        found[row] = digests
        if hasattr(handle, "close"):
            handle.close()
    return found


def digest_of(tensors: Iterable[Tensor]) -> str:
    bits = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        bits.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def entries_in(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the tensors of a saved state with their places, in order."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping | list | tuple):
        for name, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from entries_in(one, (*place, str(name)))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a saved state, in order."""
    return (tensor for _, tensor in entries_in(value))


def compare(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> list[str]:
    """Return what differs, in words; what is new is no difference."""
    differences = [f"{key}: not there any more" for key in before.keys() - after.keys()]
    for key in sorted(before.keys() & after.keys()):
        changed = [place for place, digest in before[key].items() if digest != after[key].get(place)]
        if changed:
            more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            differences.append(f"{key}: {', '.join(changed[:SHOWN])}{more}")
    return differences


def main(arguments: list[str]) -> int:
    """Record or compare; return 0 if nothing differs."""
    if len(arguments) > 1 and arguments[0] == "record":
        digests = record(arguments[2:])
        Path(arguments[1]).write_text(json.dumps(digests, indent=1))
        print(f"{len(digests)} digests of {module('commhooks').__file__}")
        return 0
    if len(arguments) == 3 and arguments[0] == "compare":
        before, after = (json.loads(Path(path).read_text()) for path in arguments[1:])
        differences = compare(before, after)
        print("\n".join(differences) or f"{len(before)} digests are equal")
        return int(bool(differences))
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
