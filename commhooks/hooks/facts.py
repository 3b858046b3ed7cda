"""Facts that a hook needs about its DistributedDataParallel, ddp_core's or PyTorch's."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from commhooks.errors import AttachError

PRIVATE_NAMES = (
    "torch.distributed.optim.apply_optimizer_in_backward:_apply_optimizer_in_backward._in_backward_optimizers",
    "torch.nn.parallel:DistributedDataParallel._comm_hooks",
    "torch.nn.parallel:DistributedDataParallel._use_python_reducer",
)
"""What PyTorch keeps of its DistributedDataParallel for itself."""


def searches_for_unused(model: Module) -> bool:
    """Return whether a DDP leaves a gradient unchanged if no rank used its parameter."""
    return bool(getattr(model, "find_unused_parameters", False) or getattr(model, "static_graph", False))


def uncut_steps(model: Module | None) -> int:
    """Return the number of steps before a DDP lays out its final buckets: one more for a static graph."""
    return 2 if getattr(model, "static_graph", False) else 1


def plan_of(model: Module | None) -> dict[str, Any]:
    """Return ddp_core's layout of buckets, to be saved; PyTorch's class has none."""
    plan: Any = getattr(model, "bucket_plan", None)
    return {"ddp_core": plan()} if plan is not None else {}


def load_plan(model: Module | None, plan: Mapping[str, Any]) -> None:
    """Make ddp_core's DDP lay out its buckets as they were when they were saved."""
    load: Any = getattr(model, "load_bucket_plan", None)
    if load is not None and "ddp_core" in plan:
        load(plan["ddp_core"])


def sparse_parameters(model: Module) -> set[Tensor]:
    """Return the parameters whose gradients a DDP expects to be sparse."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    }


def check_step_has_an_end(caller: str, model: Module, policy: str, *, atomic: bool) -> None:
    """Raise `AttachError` if `policy` or `atomic` needs a step's last bucket and this DDP does not mark it."""
    if policy != "fused" and not atomic:
        return
    whole_steps = "policy must be 'fifo' and atomic False"
    if _marks_no_bucket_as_last(model):
        raise AttachError(
            f"{caller}: {whole_steps} for PyTorch's DistributedDataParallel with static_graph=True and parameters "
            "of several dtypes or devices, sparse gradients, or bucket_cap_mb_list: its first iteration has several "
            "buckets, and none of them is marked as the last."
        )
    if may_skip_buckets(model):
        raise AttachError(
            f"{caller}: {whole_steps} for a model with skip_all_reduce_unused_params=True, which may leave out the "
            "bucket that ends a step."
        )


def may_skip_buckets(model: Module) -> bool:
    """Return whether a step may leave out buckets, also the last one."""
    return bool(getattr(model, "skip_all_reduce_unused_params", False))


def check_hook_is_called(caller: str, model: Module) -> None:
    """Raise `AttachError` if this DDP reduces gradients in a way that leaves no place for a hook."""
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return
    if getattr(model, "_use_python_reducer", False):
        raise AttachError(f"{caller}: {_PYTHON_REDUCER}")
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        raise AttachError(
            f"{caller}: _apply_optimizer_in_backward was called for parameters of this model, and PyTorch's "
            "DistributedDataParallel then registers its own hook and accepts no other. Use "
            "ddp_core.DistributedDataParallel, which steps in the backward pass after any hook, or step the optimizer "
            "after it."
        )


def check_bucket(bucket: object) -> None:
    """Raise `AttachError` if a DDP passed its hook something other than a bucket."""
    if isinstance(bucket, tuple):
        raise AttachError(f"expected a bucket of gradients, got a tuple: {_PYTHON_REDUCER}")


_PYTHON_REDUCER = (
    'torch._dynamo.config.optimize_ddp was "python_reducer" when this model was wrapped, and PyTorch\'s '
    "DistributedDataParallel then calls hooks with one parameter at a time and ignores what they return. Set it to "
    "True or False before you wrap the model, or use ddp_core.DistributedDataParallel."
)


def _marks_no_bucket_as_last(model: Module) -> bool:
    """Return whether the first iteration of PyTorch's DDP has several buckets and `is_last()` is true of none.

    With static_graph=True it reduces them all at the end of the first backward pass, each under index 0.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel) or not getattr(model, "static_graph", False):
        return False
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    sparse = sparse_parameters(model) & trained  # each has a bucket of its own
    kinds = {(parameter.dtype, parameter.device) for parameter in trained - sparse}
    return len(kinds) + len(sparse) > 1 or bool(getattr(model, "bucket_bytes_cap_list", ()))
