"""PyTorch's default communication hooks, under PyTorch's names: changing an import is the whole migration.

For `model.register_comm_hook(process_group, hook)` on ddp_core's DDP or PyTorch's; `process_group` may be None for the
default group. See hook.py for what PyTorch demands of these functions.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from commhooks.compressors import AllReduceMean, Cast
from commhooks.hook import Hook, run_stateless
from commhooks.wrappers import WireDtype

RunOnWire = Callable[[Any, GradBucket, torch.dtype], torch.futures.Future[Tensor]]

on_wire: dict[Callable[..., Any], RunOnWire] = {}
"""For each hook of ours: how to run it with what it sends cast to a dtype."""


def allreduce_hook(process_group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the bucket, uncompressed."""
    return run_stateless(AllReduceMean(), process_group, bucket)


def fp16_compress_hook(process_group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the bucket with fp16 on the wire; the division comes before the cast."""
    return run_stateless(Cast(dtype=torch.float16), process_group, bucket)


def bfloat16_compress_hook(process_group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the bucket with bf16 on the wire, on every backend that can sum bf16, Gloo too."""
    return run_stateless(Cast(dtype=torch.bfloat16), process_group, bucket)


bf16_compress_hook = bfloat16_compress_hook
# PyTorch's DDP refuses, off NCCL, whatever is *called* bf16_compress_hook (tests/commhooks/test_hooks.py registers it).


def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return the bucket as it is, exchanging nothing: replicas drift apart. For measuring only."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Return `hook` with fp16 on the wire.

    Of a hook of ours, only what it sends is cast: residuals and arithmetic keep their precision. Any other hook is
    handed the bucket cast to fp16, and its result comes back in the bucket's own dtype.
    """
    return _narrowed(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Return `hook` with bf16 on the wire; see `fp16_compress_wrapper`."""
    return _narrowed(hook, torch.bfloat16)


def _narrowed(hook: Hook, dtype: torch.dtype) -> Hook:
    run = on_wire.get(hook)

    def hook_on_narrow_wire(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return run(state, bucket, dtype) if run is not None else _run_foreign(hook, state, bucket, dtype)

    return hook_on_narrow_wire


def _run_foreign(hook: Hook, state: Any, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    """Hand a hook the bucket in `dtype`, and write what it returns into the bucket's own memory."""
    own = bucket.buffer()
    bucket.set_buffer(own.to(dtype))
    future = hook(state, bucket)
    return future.then(_WriteBack(own, bucket))


class _WriteBack:
    """Write a future's value into memory of another dtype; a class, so that nothing is defined inside a function."""

    def __init__(self, own: Tensor, bucket: GradBucket) -> None:
        self._own = own
        self._bucket = bucket

    def __call__(self, future: torch.futures.Future[Any]) -> Tensor:
        value = future.value()
        self._own.copy_(value[0] if isinstance(value, (list, tuple)) else value)
        self._bucket.set_buffer(self._own)
        return self._own


def _allreduce_on_wire(process_group: Any, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    return run_stateless(WireDtype(inner=AllReduceMean(), dtype=dtype), process_group, bucket)


on_wire.update(dict.fromkeys((allreduce_hook, fp16_compress_hook, bfloat16_compress_hook), _allreduce_on_wire))
