"""Finding the DistributedDataParallel inside the wrappers of compilers and frameworks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from commhooks.errors import AttachError
from commhooks.tensors import has_own_bytes, local, shard_of

PRIVATE_NAMES = (
    "torch._C._distributed_c10d:Reducer._get_zeros_like_grad_buckets",
    "torch._dynamo.eval_frame:OptimizedModule._orig_mod",
    "torch.distributed._composable.replicate:_ReplicateState._ddp",
    "torch.distributed._composable.replicate:_ReplicateState.has_initialized",
    "torch.distributed._composable.replicate:_ReplicateState.lazy_init",
    "torch.distributed._composable.replicate:replicate.state",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:ActivationWrapper._checkpoint_wrapped_module",
    "torch.nn.parallel:DistributedDataParallel._ddp_params_and_buffers_to_ignore",
)

_WRAPPERS = (
    "_forward_module",  # of lightning.fabric's _FabricModule
    "_orig_mod",  # of torch.compile's OptimizedModule
)
"""The attributes in which wrappers keep the module that they wrap."""
_NAMES_OF_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


def unwrapped(model: Module) -> Module:
    """Return the module inside the wrappers of `torch.compile` and Fabric, or the module itself if there are none."""
    while (inner := _inside(model, _WRAPPERS)) is not None:
        model = inner
    return model


def _inside(model: Module, places: Iterable[str]) -> Module | None:
    """Return the module in the first of these places that holds one."""
    # "is not None", never truth: OptimizedModule has a length if the module that it wraps has one, else len() raises.
    return next((inner for place in places if (inner := model._modules.get(place)) is not None), None)


def bare(model: Module) -> Module:
    """Return the module within a DistributedDataParallel and all other wrappers."""
    ddp = unwrapped(model)
    inner: Any = ddp.module if is_ddp(ddp) else ddp
    return unwrapped(inner)


def is_ddp(model: object) -> bool:
    """Return whether this is a DistributedDataParallel, ddp_core's or PyTorch's."""
    return hasattr(model, "register_comm_hook") and isinstance(getattr(model, "module", None), Module)


def find_ddp(caller: str, model: object) -> Module:
    """Return the DistributedDataParallel, ddp_core's or PyTorch's, that `model` is or wraps.

    Raises `AttachError` if there is none, if it contains another one that averages gradients of the same parameters, or
    if the model's parameters are sharded.
    """
    found = described(model)
    if not isinstance(model, Module):
        raise AttachError(f"{caller}: expected a DistributedDataParallel, ddp_core's or PyTorch's (got {found}).")
    ddp = unwrapped(model)
    if is_sharded(ddp):
        raise AttachError(
            f"{caller}: {found} shards its parameters, so each rank holds only a part of each gradient. For a model "
            "that fully_shard was called with use commhooks.attach_sharded, and between machines that each have all "
            "shards commhooks.attach_replicas; or use DistributedDataParallel."
        )
    ddp = _replicated(ddp) or ddp
    if not is_ddp(ddp):
        raise AttachError(
            f"{caller}: expected a DistributedDataParallel, ddp_core's or PyTorch's (got {found}); "
            "wrap the model first. If a framework wraps it, pass the model that it returned, or use its module in "
            "commhooks.integrations."
        )
    for within, module in ddp.named_modules():
        if module is ddp or not is_ddp(module):
            continue
        twice = _in_buckets(ddp) & _in_buckets(module)
        if name := next((name for name, one in ddp.named_parameters() if one in twice), ""):
            raise AttachError(
                f"{caller}: {found} contains another DistributedDataParallel, {within!r}: the gradient of {name!r} "
                "would be averaged twice, once by each. Wrap the model once (a framework's prepare() or setup() may "
                "already do it), or let the outer one ignore the parameters of the inner one."
            )
    return ddp


def trained_parameters(model: Module, ddp: Module) -> list[tuple[str, Tensor]]:
    """Return the parameters whose gradients come in the buckets of `ddp`, which `find_ddp` found in `model`.

    Each comes with its name without any wrapper, so that a checkpoint loads with and without `torch.compile`.
    """
    in_buckets = _in_buckets(ddp)
    # replicate() hands its DDP a bare list of parameters; their names are in the module that it was called with.
    named: Any = ddp.module if unwrapped(model) is ddp else unwrapped(model)
    return [(plain_name(name), p) for name, p in named.named_parameters() if p in in_buckets]


def _in_buckets(ddp: Module) -> set[Tensor]:
    """Return the parameters that are in buckets: those that required a gradient when the model was wrapped."""
    reducer: Any = getattr(ddp, "reducer", None)  # PyTorch's class makes none if nothing is left to reduce
    if hasattr(reducer, "layout"):  # ddp_core's
        return set(reducer.layout.parameters)
    # They may have been frozen before or afterwards. Only the buckets of PyTorch's reducer tell; asking for them
    # allocates their gradients, and fails if one is sparse (tests/commhooks/test_odd_parameters.py).
    managed = [p for _, p in _managed(ddp)]
    if all(p.requires_grad for p in managed) or any(getattr(module, "sparse", False) for module in ddp.modules()):
        return {p for p in managed if p.requires_grad}
    buckets = [] if reducer is None else reducer._get_zeros_like_grad_buckets()
    return {p for bucket in buckets for p in bucket.parameters()}


def _managed(ddp: Module) -> list[tuple[str, Tensor]]:
    inner = ddp.module
    assert isinstance(inner, Module), "find_ddp returned it"
    ignored = getattr(ddp, "parameters_to_ignore", ())
    return [(name, p) for name, p in inner.named_parameters() if name not in ignored]


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that compilers and activation checkpointing add."""
    return ".".join(part for part in name.split(".") if part not in _NAMES_OF_WRAPPED)


def difference_of(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return a sentence about the first trained parameter that is another one now; "" if they are the same."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) is not now.get(name):
            how = "now requires a gradient" if name not in before else "no longer requires a gradient"
            return f"{name!r} {'was replaced' if name in before and name in now else how}"
    return ""


def described(model: object) -> str:
    """Return a model's class for a message, from the outside in: "OptimizedModule around DistributedDataParallel"."""
    names = [type(model).__name__]
    while isinstance(model, Module):
        inner = _inside(model, (*_WRAPPERS, "module"))
        if inner is None:
            break
        names.append(type(inner).__name__)
        model = inner
    return " around ".join(names)


@torch.no_grad()
def kept_buffers(module: Module, *, saved: bool = True, with_ignored: bool = False) -> dict[str, Tensor]:
    """Return the buffers that are in the module's state_dict, or those that are not: caches, of any shape.

    Of DTensors, as tensor parallelism makes them, this rank's shards are returned. Left out are those that cannot be
    sent (see `has_own_bytes`) and, unless `with_ignored`, those that a DistributedDataParallel is to ignore.
    """
    kept, ignored = module.state_dict().keys(), set() if with_ignored else _ignored_names(module)
    wanted = {n: shard_of(b) for n, b in module.named_buffers() if (n in kept) == saved and n not in ignored}
    return {plain_name(name): own.detach() for name, own in wanted.items() if has_own_bytes(own) and own.numel()}


def reshard(model: Module) -> None:
    """Return modules that FSDP2 has gathered to their shards, before the shards change."""
    fsdp = _loaded("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


@torch.no_grad()
def everything_kept(model: Module, exchanged: Iterable[Tensor] = ()) -> dict[str, Tensor]:
    """Return the parameters, frozen ones included, and the saved buffers, by name; of sharded ones, this rank's shards.

    Left out are what a DistributedDataParallel or `fully_shard` is to ignore, except for the `exchanged` parameters,
    and frozen parameters that cannot be sent: see `has_own_bytes`.
    """
    reshard(model)
    ignored = _ignored_parameters(model) - set(exchanged)
    kept = {
        plain_name(name): local(p)
        for name, p in model.named_parameters()
        if p not in ignored and (p.requires_grad or has_own_bytes(shard_of(p)))
    }
    return kept | kept_buffers(model)


def _ignored_parameters(model: Module) -> set[Tensor]:
    names, fsdp = _ignored_names(model), _loaded("torch.distributed.fsdp")
    sharded = [module for module in model.modules() if fsdp is not None and isinstance(module, fsdp.FSDPModule)]
    whole = {p for module in sharded for p in module.parameters() if not hasattr(p, "to_local")}
    return whole | {p for name, p in model.named_parameters() if name in names}


def _ignored_names(module: Module) -> set[str]:
    """Return the names that PyTorch's DistributedDataParallel looks up in the module that it wraps."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def is_sharded(model: Module) -> bool:
    """Return whether the parameters are sharded over the ranks, by FSDP or `fully_shard`."""
    fsdp = _loaded("torch.distributed.fsdp")
    sharded = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(isinstance(module, sharded) for module in model.modules())


def _replicated(model: Module) -> Module | None:
    """Return the DistributedDataParallel that PyTorch's `replicate` keeps for a module, creating it if needed."""
    composable = _loaded("torch.distributed._composable.replicate")
    if composable is None or not isinstance(model, composable.DDP):
        return None
    state = composable.replicate.state(model)
    if not state.has_initialized:
        state.lazy_init()  # as its first forward pass would
    ddp: Module = state._ddp
    return ddp


def _loaded(module: str) -> Any:
    """Return a module if it was imported: before that no model has its classes, and importing it is slow."""
    return sys.modules.get(module)
