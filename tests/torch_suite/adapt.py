"""Let tests that were written for one GPU a rank run on the CPU.

Decorators that ask for GPUs are replaced before the suite is imported; while a test runs, every CUDA device is the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

from tests.torch_suite import sync_batchnorm

Function = Callable[..., Any]
SYNC_CHECK = "_passing_sync_batchnorm_handle"  # PyTorch's class refuses SyncBatchNorm on the CPU there


def unconditional(*_args: Any, **_kwargs: Any) -> Function:
    """Replace a decorator that requires a number of GPUs."""
    return lambda function: function


def one_device_each(world_size: int, backend: str) -> dict[int, list[int]]:
    """Replace the helper that assigns GPUs."""
    return {rank: [rank] for rank in range(int(world_size))}


def ask_for_no_gpu() -> None:
    """Replace what asks for GPUs; to be called before the suite is imported, which takes these names over."""
    common_distributed.skip_if_no_gpu = lambda function: function
    common_distributed.skip_if_lt_x_gpu = unconditional
    common_distributed.nccl_skip_if_lt_x_gpu = unconditional
    common_distributed.init_multigpu_helper = one_device_each


def is_cuda(device: object) -> bool:
    """Return whether an argument names a CUDA device (an int does)."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return (isinstance(device, str) and device.startswith("cuda")) or type(device) is int


def on_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device, and anything else as it came."""
    return torch.device("cpu") if is_cuda(device) else device


class NoStream:
    """Stand for a stream or an event: on the CPU everything is done in order."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Function:
        return lambda *args, **kwargs: None

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_args: object) -> None: ...

    def __deepcopy__(self, memory: dict[int, Any]) -> NoStream:
        return self


class CudaIsCpu(TorchFunctionMode):
    """Send to the CPU what a test wants on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *map(on_cpu, args[1:]))
        if func is torch.ones and args[-2:] == (1000, 1000):  # a picture that takes a CPU core minutes per test
            args = (*args[:-2], 40, 40)
        return func(*args, **kwargs)


def _module_to(to: Function) -> Function:
    @functools.wraps(to)
    def adapted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return to(self, *map(on_cpu, args), **kwargs)

    return adapted


def _on_any_device(forward: Function) -> Function:
    @functools.wraps(forward)
    def adapted(self: nn.Module, x: torch.Tensor) -> Any:
        # it asks for a GPU or for a device of this name
        with mock.patch.object(torch._C, "_get_privateuse1_backend_name", return_value="cpu"):
            return forward(self, x)

    return adapted


def _mesh_on_cpu(init_device_mesh: Function) -> Function:
    @functools.wraps(init_device_mesh)
    def adapted(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return init_device_mesh("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return adapted


def _allowed_on_cpu(ddp: type[nn.Module]) -> AbstractContextManager[Any]:
    """Hide SyncBatchNorm, for which we have CPU kernels, from our class's check for it."""
    return contextlib.nullcontext() if hasattr(ddp, SYNC_CHECK) else mock.patch.object(nn, "SyncBatchNorm", NoStream)


def without_device_ids(ddp: type[nn.Module]) -> Function:
    """Return the class's `__init__`, but for `device_ids` and `output_device` that name one GPU: those are dropped."""
    init = ddp.__init__

    @functools.wraps(init)
    def adapted(
        self: nn.Module, module: nn.Module, device_ids: Any = None, output_device: Any = None, **rest: Any
    ) -> None:
        if device_ids is not None and len(device_ids) == 1 and is_cuda(device_ids[0]):
            device_ids = None
        if is_cuda(output_device):
            output_device = None
        with _allowed_on_cpu(ddp):
            init(self, module, device_ids=device_ids, output_device=output_device, **rest)

    return adapted


@contextlib.contextmanager
def cuda_is_cpu(ddp: type[nn.Module]) -> Iterator[None]:
    """Adapt devices while a test of `ddp` runs."""
    rank = int(os.environ.get("RANK", "0"))
    with contextlib.ExitStack() as stack:

        def replace(owner: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(ddp, "__init__", without_device_ids(ddp))
        if hasattr(ddp, SYNC_CHECK):
            replace(ddp, SYNC_CHECK, lambda self, module: None)
        replace(nn.Module, "cuda", lambda self, device=None: self)
        replace(nn.Module, "to", _module_to(nn.Module.to))
        replace(device_mesh, "init_device_mesh", _mesh_on_cpu(device_mesh.init_device_mesh))
        for name in ("set_device", "synchronize", "manual_seed"):
            replace(torch.cuda, name, lambda *args, **kwargs: None)
        replace(torch.cuda, "current_device", lambda: rank)
        replace(torch.accelerator, "current_stream", NoStream)
        replace(torch, "Stream", NoStream)
        replace(torch, "Event", NoStream)
        replace(nn.SyncBatchNorm, "forward", _on_any_device(nn.SyncBatchNorm.forward))
        kernels = sync_batchnorm.provide()
        stack.callback(kernels._destroy)
        stack.enter_context(CudaIsCpu())
        yield
