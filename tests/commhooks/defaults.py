"""What each form of compressor computes under the defaults that a process may set, as digests.

Everything that is no business of the package, such as models and gradients, is made with explicit dtypes and devices,
and outside of the defaults. As a script, `python -O -m tests.commhooks.defaults RANK STORE` is one of two ranks of a
world that meets in a file, without assertions, and prints its digests.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks.communicators.parent_group import group_or_default
from commhooks.exchange import ProcessGroupConnection
from commhooks.lockstep import average_in_lockstep, lockstep_connections
from tests.cases import BY_NAME, FORMS
from tests.commhooks.models import Given, gradients_of, wrap
from tests.golden import digest_of, tensors_in
from tests.world import run_world

SHAPES = [(40, 33), (33,), (24, 4, 3, 3), (), (7,)]
NAMES = [f"layer{number}" for number in range(len(SHAPES))]
STEPS = 3
Around = Callable[[], AbstractContextManager[Any]]


@contextlib.contextmanager
def _set(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


@contextlib.contextmanager
def _warnings_raise() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


DEFAULTS: dict[str, Around] = {
    "none": nullcontext,
    "float64": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: _set(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "float16": lambda: _set(torch.set_default_dtype, torch.float16, torch.float32),
    "meta": lambda: _set(torch.set_default_device, "meta", None),
    "inference": torch.inference_mode,
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "warnings": _warnings_raise,
}
"""Under "deterministic", what has no deterministic form raises, and `torch.empty` returns NaN."""
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(100 * rank + step)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in SHAPES]
    return [one.to(dtype) for one in drawn]


def attached(rank: int, name: str, around: Around) -> list[Tensor]:
    """Attach to a model, step, save, load and step again."""
    module = Given(*SHAPES)
    model = wrap("core", module, bucket_cap_mb=0.004)
    given = [gradients(rank, step) for step in range(STEPS)]
    found: list[Tensor] = []
    with around():
        handle = commhooks.attach(model, BY_NAME[name].make())
        for step in range(STEPS):
            model.zero_grad()
            model(*given[step]).backward()
            found += gradients_of(module)
            state = handle.state_dict()
            handle.load_state_dict(state)
        found += tensors_in(state)
        sent = handle.statistics()
        found.append(torch.tensor([sent.collectives, sent.payload_bytes, sent.moved_bytes], device="cpu"))
        handle.memory()
        handle.close()
    return found


def exchanged(
    rank: int, name: str, dtype: torch.dtype, connection: ProcessGroupConnection, around: Around
) -> list[Tensor]:
    """Average, save and load under the default, and average again without it."""
    rounds = [dict(zip(NAMES, gradients(rank, step, dtype), strict=True)) for step in range(STEPS)]
    with around():
        exchanger = commhooks.Exchanger(rounds[0], BY_NAME[name].make(), connection=connection)
        for one in rounds[:-1]:
            exchanger.average(one)
        exchanger.load_state_dict(exchanger.state_dict())
        exchanger.replace(BY_NAME[name].make())
    exchanger.average(rounds[-1])
    found = [*(value for one in rounds for value in one.values()), *tensors_in(exchanger.state_dict())]
    exchanger.close()
    return found


def in_lockstep(rank: int, compressor: str, around: Around) -> list[Tensor]:
    """Average two workers' tensors in this process."""
    rounds = [[dict(zip(NAMES, gradients(worker, step), strict=True)) for worker in (0, 1)] for step in range(STEPS)]
    with around():
        exchangers = [
            commhooks.Exchanger(rounds[0][0], compressor, connection=connection)
            for connection in lockstep_connections(2)
        ]
        for one in rounds[:-1]:
            average_in_lockstep(exchangers, one)
    average_in_lockstep(exchangers, rounds[-1])
    return [value for one in rounds for worker in one for value in worker.values()]


def hooked(rank: int, kind: str, hook: Any, around: Around) -> list[Tensor]:
    """Register a hook that runs under the default, while the model and its backward pass do not."""
    module = Given(*SHAPES)
    model: Any = wrap(kind, module, bucket_cap_mb=0.004)
    under = [False] * (STEPS - 1) + [True]

    def wrapped(state: Any, bucket: Any) -> Any:
        with around() if under[0] else nullcontext():
            return hook(state, bucket)

    wrapped.__annotations__.clear()  # PyTorch wants the class itself, or nothing
    is_powersgd = hook is commhooks.powerSGD_hook
    model.register_comm_hook(commhooks.PowerSGDState(None, 2, start_powerSGD_iter=1) if is_powersgd else None, wrapped)
    found: list[Tensor] = []
    for step in range(STEPS):
        under = [step < STEPS - 1]
        model.zero_grad()
        model(*gradients(rank, step)).backward()
        found += gradients_of(module)
    return found


def seldom(rank: int, compressor: str, around: Around) -> list[Tensor]:
    """Average a model by DiLoCo, and by ModelAverager."""
    found: list[Tensor] = []
    for make in (commhooks.DiLoCo, functools.partial(commhooks.ModelAverager, warmup_steps=1)):
        model = Given(*SHAPES)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with nullcontext() if around is torch.inference_mode else around():
            training: Any = make(model, optimizer, every=2, compressor=compressor)
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            model(*gradients(rank, step)).backward()
            optimizer.step()
            with around() if step < STEPS + 1 else nullcontext():
                if isinstance(training, commhooks.DiLoCo):
                    training.step()
                else:
                    training.average_parameters(model.parameters())
                training.load_state_dict(training.state_dict())
        found += [*(parameter.detach() for parameter in model.parameters()), *tensors_in(training.state_dict())]
        training.close()
    return found


def sharded(rank: int, way: str, compressor: str, around: Around) -> list[Tensor]:
    """Train FSDP2's shards, or replicas of them."""
    model = nn.Sequential(nn.Linear(24, 40, dtype=torch.float32, device="cpu"), nn.Flatten())
    shape = (2, 1) if way == "attach_replicas" else (1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(gradients(0, number)[0].view(-1)[: parameter.numel()].view_as(parameter))
    fully_shard(model, mesh=mesh["shards"])
    inputs = gradients(rank, 0)[0].view(-1)[: 24 * 8].view(8, 24)
    found: list[Tensor] = []
    with around():
        group = {"process_group": mesh.get_group("replicas")} if way == "attach_replicas" else {}
        handle = getattr(commhooks, way)(model, compressor, **group)
        for _ in range(STEPS):
            model.zero_grad()
            model(inputs).square().mean().backward()
            found += [shard.grad.to_local().clone() for shard in model.parameters()]  # type: ignore[union-attr]
            handle.load_state_dict(handle.state_dict())
        handle.close()
    return found


def ways(names: Sequence[str], default: str) -> dict[str, Callable[[int, Around], list[Tensor]]]:
    """Return what is tried under a default, by name; without a default, everything that is tried under any."""
    found: dict[str, Callable[[int, Around], list[Tensor]]] = {}
    dtypes = [torch.float32, *(dtype for of, dtype in DTYPES.items() if default in (of, "none"))]
    connection = ProcessGroupConnection(group_or_default(None), policy="fused")
    connection.join()  # of nobody: it is open until the process ends
    for name in names:
        if default != "inference":  # in which there is no backward pass
            found[f"{name}, attach"] = functools.partial(_call, attached, name)
        for dtype in dtypes:
            found[f"{name}, Exchanger, {dtype}"] = functools.partial(_call, exchanged, name, dtype, connection)
    for kind in ("core", "torch"):
        for hook in (commhooks.powerSGD_hook, commhooks.fp16_compress_hook):
            found[f"{hook.__name__}, {kind}"] = functools.partial(_call, hooked, kind, hook)
    for compressor in ("powersgd", "int8"):
        found[f"DiLoCo and ModelAverager, {compressor}"] = functools.partial(_call, seldom, compressor)
        found[f"average_in_lockstep, {compressor}"] = functools.partial(_call, in_lockstep, compressor)
    for way in ("attach_sharded", "attach_replicas") if default != "inference" else ():
        found[way] = functools.partial(_call, sharded, way, "int8")
    return found


def _call(function: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
    *own, rank, around = arguments
    return function(rank, *own, around)


def digests(rank: int, default: str, names: Sequence[str]) -> dict[str, str]:
    """Return the digest of each way, or the error that it raised."""
    found = {}
    for way, run in ways(names, default).items():
        try:
            found[way] = digest_of(run(rank, DEFAULTS[default]))
        except Exception as error:
            found[way] = f"{type(error).__name__}: {error}"
    return found


def digests_of_ranks(default: str, names: Sequence[str]) -> list[dict[str, str]]:
    """Return the digests of two new processes, in which nothing was computed before without the default."""
    found: list[dict[str, str]] = run_world(digests, 2, default, names, check_exit=False)
    return found


def main(rank: str, store: str) -> None:
    if __debug__:
        raise SystemExit("run it with python -O")
    dist.init_process_group("gloo", store=FileStore(store, 2), rank=int(rank), world_size=2)
    print(json.dumps(digests(int(rank), "none", FORMS)), flush=True)
    os._exit(0)  # PyTorch's DDP over Gloo now and then aborts at exit


if __name__ == "__main__":
    main(*sys.argv[1:])
