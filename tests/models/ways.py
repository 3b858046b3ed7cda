"""The training of a kind of model through one of the ways in, on two ranks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
import ddp_core
from commhooks.tensors import local
from tests.models.kinds import KINDS, Batch, Kind, held_out, loss_of, made
from tests.world import run_world

RANKS, EVERY, SECONDS = 2, 5, 300.0
"""DiLoCo averages once in `EVERY` steps. A world's ranks are killed after `SECONDS`, however busy the machine is."""


@dataclasses.dataclass
class Wrapped:
    """A model, the step after a backward pass, and what counts what is sent, if anything does."""

    model: Callable[[Tensor], Tensor]
    step: Callable[[], Any]
    handle: Any = None


@dataclasses.dataclass(frozen=True)
class Trained:
    """One training: the loss on held-out data before and after, and what was sent."""

    before: float
    after: float
    payload: int
    rounds: int
    unequal: Sequence[int]
    """The steps after which replicas that should have been equal were not; there are none with FSDP2."""


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=3e-3)


def ddp(wrapper: Callable[..., nn.Module], kind: Kind, model: nn.Module, compressor: str | None) -> Wrapped:
    wrapped = wrapper(model, find_unused_parameters=not kind.uses_all)
    handle = commhooks.attach(wrapped, compressor) if compressor else None
    return Wrapped(wrapped, adam(model).step, handle)


def fsdp2(_kind: Kind, model: nn.Module, compressor: str | None) -> Wrapped:
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in (*model.blocks, model):  # type: ignore[misc]  # each kind has blocks
        fully_shard(module, mesh=mesh)
    if not compressor:
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # FSDPModule's
    handle = commhooks.attach_sharded(model, compressor) if compressor else None
    return Wrapped(model, adam(model).step, handle)


def replicas(_kind: Kind, model: nn.Module, compressor: str | None) -> Wrapped:
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicas", "self"))
    for module in (*model.blocks, model):  # type: ignore[misc]  # as above
        fully_shard(module, mesh=mesh["self"])
    handle = commhooks.attach_replicas(model, compressor or "all-reduce", process_group=mesh["replicas"].get_group())
    return Wrapped(model, adam(model).step, handle)


def diloco(_kind: Kind, model: nn.Module, compressor: str | None) -> Wrapped:
    optimizer = adam(model)
    handle = commhooks.DiLoCo(
        model,
        optimizer,
        every=EVERY,
        compressor=compressor or "all-reduce",
        outer=functools.partial(torch.optim.SGD, lr=1.0),
    )

    def step() -> None:
        optimizer.step()
        handle.step()

    return Wrapped(model, step, handle)


WAYS: dict[str, Callable[[Kind, nn.Module, str | None], Wrapped]] = {
    "DDP": functools.partial(ddp, nn.parallel.DistributedDataParallel),
    "ddp_core": functools.partial(ddp, ddp_core.DistributedDataParallel),
    "FSDP2": fsdp2,
    "replicas": replicas,
    "DiLoCo": diloco,
}


def trained(of_kind: str, way: str, compressor: str | None, seeds: Sequence[int], steps: int) -> list[Trained]:
    """Train new models, one for each seed, on the ranks of one world."""
    quietly = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # PyTorch's DDP warns if a first batch happens to use all parameters
    call = (of_kind, way, compressor, seeds, steps)
    first, *others = run_world(_train_all, RANKS, *call, timeout=SECONDS, environment=quietly)
    assert others == [first] * len(others), "every rank sends as much, and computes with the same models"
    return list(first)


def _train_all(
    rank: int, of_kind: str, way: str, compressor: str | None, seeds: Sequence[int], steps: int
) -> list[Trained]:
    return [train(rank, of_kind, way, compressor, seed, steps) for seed in seeds]


def train(rank: int, of_kind: str, way: str, compressor: str | None, seed: int, steps: int) -> Trained:
    """Train a new model, each rank on data of its own, without a compressor if there is none."""
    kind = KINDS[of_kind]
    model = made(kind, seed)
    wrapped = WAYS[way](kind, model, compressor)
    test, generator = held_out(kind), torch.Generator().manual_seed(1000 * seed + rank + 1)
    before, unequal = _evaluated(wrapped, test), []
    for step in range(1, steps + 1):
        loss_of(wrapped.model, kind.batch(generator)).backward()
        wrapped.step()
        model.zero_grad()
        have_all = way != "FSDP2" and (way != "DiLoCo" or step % EVERY == 0)
        if have_all and not _equal_on_all_ranks(model):
            unequal.append(step)
    counts = None if wrapped.handle is None else wrapped.handle.statistics()
    counts = getattr(counts, "traffic", counts)  # DiLoCo counts rounds, too
    after = _evaluated(wrapped, test)
    if wrapped.handle is not None:
        wrapped.handle.close()
    payload = counts.payload_bytes if counts is not None else 0
    return Trained(before, after, payload, steps // (EVERY if way == "DiLoCo" else 1), unequal)


@torch.no_grad()
def _evaluated(wrapped: Wrapped, test: Batch) -> float:
    """Return the loss on held-out data, of rank 0's model if each rank has its own."""
    loss = loss_of(wrapped.model, test)
    dist.broadcast(loss, 0)
    return loss.item()


def _equal_on_all_ranks(model: nn.Module) -> bool:
    """Return whether all ranks have the same bits in their parameters."""
    digest = hashlib.blake2b(digest_size=8)
    for one in model.parameters():
        digest.update(local(one).detach().numpy().tobytes())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return all(torch.equal(own, other) for other in every)
