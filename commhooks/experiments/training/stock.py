"""PyTorch's own communication hooks, as contenders: 'torch.fp16', 'torch.powersgd:matrix_approximation_rank=4'.

They call the process group of their DDP, so a `LinkedGroup` puts the link under them. PyTorch accepts a hook only if
its annotations are types rather than strings, so this file has no `from __future__ import annotations`.
"""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future

from commhooks.experiments.specs import Spec

PREFIX = "torch."
NO_HOOK = "torch.none"
"""PyTorch's own collectives, without any hook: DDP's all-reduce, or FSDP2's exchanges."""
_POWERSGD = "torch.powersgd"
_BF16 = "torch.bf16"
_FRACTIONS = {"min_compression_rate", "orthogonalization_epsilon"}  # their defaults are ints, and they need not be
_STATELESS: dict[str, Callable[..., Any]] = {
    "torch.all-reduce": default_hooks.allreduce_hook,
    "torch.fp16": default_hooks.fp16_compress_hook,
    _BF16: default_hooks.bf16_compress_hook,
}


def stock_names() -> tuple[str, ...]:
    """Return the names of PyTorch's hooks that can run over any backend."""
    return (NO_HOOK, *(name for name in _STATELESS if name != _BF16), _POWERSGD)


def is_stock(spec: Spec) -> bool:
    """Return whether this hook is one of PyTorch's, by its name."""
    return spec.name.startswith(PREFIX) and ":" not in spec.name and "(" not in spec.name


def stock_settings(name: str) -> dict[str, Any]:
    """Return the settings of one of PyTorch's hooks, with their defaults."""
    parameters = inspect.signature(powerSGD_hook.PowerSGDState).parameters if name == _POWERSGD else {}
    return {key: each.default for key, each in parameters.items() if key != "process_group"}


def check_stock(spec: Spec, backend: str = "gloo") -> None:
    """Raise ValueError, before any process starts, if PyTorch has no such hook for a backend, or no such setting."""
    if spec.name == _BF16 and backend == "gloo":
        raise ValueError(
            f"hook {spec.label!r}: PyTorch's DistributedDataParallel accepts bf16_compress_hook, by its name, only "
            "with NCCL, and these runs use Gloo; 'torch.fp16' runs, and so does 'bf16', which is ours."
        )
    if spec.name not in (*stock_names(), _BF16):
        names = _list_of(stock_names(), spec.name)
        raise ValueError(f"hook {spec.label!r}: PyTorch's hooks here are {names}")
    known = stock_settings(spec.name)
    for name, value in spec.settings:
        if name not in known:
            has = _list_of(tuple(known), name) if known else "no settings."
            raise ValueError(f"hook {spec.label!r}: there is no setting {name!r}; {spec.name!r} has {has}")
        kind = type(known[name])
        if type(value) is not kind and not (name in _FRACTIONS and type(value) is float):
            raise ValueError(f"hook {spec.label!r}: {name} must be of type {kind.__name__} (got {value!r})")
        if name == "matrix_approximation_rank" and value < 1:
            raise ValueError(f"hook {spec.label!r}: {name} must be at least 1 (got {value})")
    if spec.name == _POWERSGD:
        try:
            _powersgd_state(spec, None)
        except ValueError as error:
            raise ValueError(f"hook {spec.label!r}: {error}") from error


def register_stock(
    ddp: Any, spec: Spec, group: dist.ProcessGroup, *, is_ordered: bool = False
) -> powerSGD_hook.PowerSGDState | None:
    """Register one of PyTorch's hooks with a DDP of either class, and return PowerSGD's state, if that is the hook.

    It communicates over `group`, the DDP's own; `is_ordered` if streams order its collectives, as NCCL's.
    """
    if spec.name == _POWERSGD:
        state = _powersgd_state(spec, group)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook if is_ordered else _powersgd_of_one_bucket)
        return state
    if spec.name != NO_HOOK:
        ddp.register_comm_hook(group, _STATELESS[spec.name])
    return None


def _powersgd_of_one_bucket(state: powerSGD_hook.PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Run PyTorch's hook, unless there are several buckets: then it aborts the process, or hangs.

    Callbacks of its collectives start further ones, so with several buckets the ranks start them in different orders.
    """
    if bucket.index() > 0 or not bucket.is_last():
        raise RuntimeError(
            "PyTorch's powerSGD_hook fails over Gloo if the gradients are in several buckets: the ranks start its "
            "collectives in different orders, and the process aborts or hangs. Choose buckets large enough for all "
            "gradients together (bucket_cap_mb), or compare with 'powersgd', which is ours."
        )
    return powerSGD_hook.powerSGD_hook(state, bucket)


def _powersgd_state(spec: Spec, group: dist.ProcessGroup | None) -> powerSGD_hook.PowerSGDState:
    settings: dict[str, Any] = dict(spec.settings)
    return powerSGD_hook.PowerSGDState(group, **settings)


def _list_of(names: tuple[str, ...], wrong: str) -> str:
    near = difflib.get_close_matches(wrong, names, 1)
    return ", ".join(names) + "." + (f" Did you mean {near[0]!r}?" if near else "")
