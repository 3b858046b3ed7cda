"""The requirements for a wrapped module, checked before anything is communicated."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ddp_core.buckets import MIB, Limits


def choose_process_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """Return the group to reduce over: the given one, the mesh's only dimension, or the default one."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        process_group = device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        if not dist.is_initialized():
            raise ValueError(
                "Default process group has not been initialized, please make sure to call init_process_group "
                "before DistributedDataParallel, or pass process_group."
            )
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(f"process_group must be one that this rank belongs to (got {process_group!r})")
    return process_group


def check_module(module: nn.Module, parameters: Sequence[Tensor]) -> None:
    """Raise for a module that cannot be wrapped; ``parameters`` leaves out ignored ones and includes frozen ones.

    Raises RuntimeError for uninitialised (lazy) parameters or if no parameter requires a gradient; ValueError for mixed
    device types or SyncBatchNorm on the CPU.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise RuntimeError(
                f"Modules with uninitialized parameters can't be used with `DistributedDataParallel`: {name!r} is one. "
                "Run a dummy forward pass to correctly initialize the modules."
            )
    if not any(parameter.requires_grad for parameter in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    types = sorted({parameter.device.type for parameter in parameters})
    if len(types) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but its parameters are on "
            f"{' and '.join(types)}: move them all with module.to(device)."
        )
    if types == ["cpu"] and any(isinstance(submodule, nn.SyncBatchNorm) for submodule in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")


def check_arguments_without_effect(mixed_precision: object, check_reduction: bool) -> None:
    """Raise NotImplementedError if ``mixed_precision`` is given, and warn about ``check_reduction``."""
    if mixed_precision is not None:
        raise NotImplementedError(
            "mixed_precision is not supported: compute in low precision under torch.autocast, and communicate in it "
            "with a casting communication hook (register_comm_hook)"
        )
    if check_reduction:
        warnings.warn("check_reduction is deprecated and has no effect", FutureWarning, stacklevel=3)


def choose_devices(
    device_ids: Sequence[int | torch.device] | None, output_device: Any, parameters: Sequence[Tensor]
) -> tuple[list[torch.device] | None, torch.device | None]:
    """Return the one device to which inputs are moved, as a list, and the output device; (None, None) for neither.

    Raises ValueError for more than one id, or for ids with a module on the CPU or on several devices.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can only be None or contain a single element. (got {list(device_ids)})")
    devices = {parameter.device for parameter in parameters}
    kind = next(iter(devices)).type
    if device_ids and kind != "cpu" and len(devices) == 1:
        return [_device(device_ids[0], kind)], _device(device_ids[0] if output_device is None else output_device, kind)
    if device_ids or output_device:
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with single-device/"
            f"multiple-device GPU modules or CPU modules, but got device_ids {device_ids}, output_device "
            f"{output_device}, and module parameters {devices}."
        )
    return None, None


def _device(device: int | torch.device, kind: str) -> torch.device:
    return torch.device(kind, device) if isinstance(device, int) else torch.device(device)


def choose_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Return two bools: whether rank 0's buffers are copied at construction, and before each forward pass."""
    if broadcast_buffers is not None:
        warnings.warn(
            f"`broadcast_buffers` is deprecated{' and ignored' if forward_sync_buffers is not None else ''}. Use "
            "`forward_sync_buffers`; with False it still copies rank 0's buffers once, at construction.",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return True, forward_sync_buffers
    return (True, True) if broadcast_buffers is None else (broadcast_buffers, broadcast_buffers)


def choose_limits(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None, one_bucket_at_first: bool
) -> Limits:
    """Turn the constructor's sizes (MiB) into limits (bytes) for the first buckets and for the rebuilt ones.

    Lower: communication starts earlier, in more and smaller messages. ``one_bucket_at_first``: the order in which
    gradients become ready is not known yet, so limits apply only once it is. Raises ValueError for a size that is not
    positive.
    """
    for cap in [*([] if bucket_cap_mb is None else [bucket_cap_mb]), *(bucket_cap_mb_list or [])]:
        if not cap > 0:
            raise ValueError(f"bucket_cap_mb must be a positive number of MiB (got {cap!r})")
    if bucket_cap_mb_list:
        limits = tuple(_bytes(cap) for cap in bucket_cap_mb_list)
        return Limits(limits, limits)
    limits = Limits().rebuilt if bucket_cap_mb is None else (_bytes(bucket_cap_mb),)
    return Limits(Limits().first if one_bucket_at_first else limits, limits)


def _bytes(mib: float) -> int:
    return int(min(mib * MIB, sys.maxsize))


def refuse_distributed_autograd() -> None:
    """Raise in a ``torch.distributed.autograd`` context: gradients would stay there and not be reduced."""
    rpc = getattr(torch._C, "_distributed_rpc", None)
    if rpc is None or not rpc._is_current_rpc_agent_set():
        return
    try:
        torch._C._distributed_autograd._current_context()
    except RuntimeError:  # there is none
        return
    raise NotImplementedError(
        "ddp_core does not reduce gradients of torch.distributed.autograd, which keeps them in its context and not in "
        "p.grad: use torch.nn.parallel.DistributedDataParallel there"
    )
