"""PyTorch's default communication hooks, under PyTorch's names: changing an import is the whole migration.

For `model.register_comm_hook(process_group, hook)` on ddp_core's DDP or PyTorch's; `process_group` may be None for the
default group. attach.py says what PyTorch demands of these functions.
"""

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from commhooks.compressors import AllReduceMean, Cast
from commhooks.errors import HookTypeError
from commhooks.hooks.foreign import AnyHook, completed, name_of, run_foreign
from commhooks.hooks.stateless import run_stateless
from commhooks.wrappers import WireDtype

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]
RunOnWire = Callable[[Any, GradBucket, torch.dtype], torch.futures.Future[Tensor]]

on_wire: MutableMapping[Callable[..., Any], RunOnWire] = weakref.WeakKeyDictionary()
"""For each hook of ours, wrapped or not: how to run it with what it sends cast to a dtype."""


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
    return completed(bucket.buffer())


def fp16_compress_wrapper(hook: AnyHook) -> Hook:
    """Return `hook` with fp16 on the wire.

    Of a hook of ours, only what it sends is cast: residuals and arithmetic keep their precision. Any other hook is
    handed the bucket cast to fp16 (an element beyond 65504 is inf then), and its result comes back in the bucket's own
    dtype. It may be any callable, and return a Future of a Tensor or of a list of one, a Tensor, or the Work of an
    all-reduce of the bucket, on PyTorch's DDP too. A sparse or complex bucket, and one that a
    cast makes no smaller, is handed on uncast. Of one wrapper round another, the outer dtype is the wire's.

    Raises `HookTypeError` for what is not callable; when it runs, `GradientError` for an integer bucket, and
    `CompressorError` for a hook that fails or returns something else (where only its future fails, a `RuntimeError`
    with that text).
    """
    return _narrowed("fp16_compress_wrapper", hook, torch.float16)


def bf16_compress_wrapper(hook: AnyHook) -> Hook:
    """Return `hook` with bf16 on the wire; see `fp16_compress_wrapper`. No finite gradient overflows bf16."""
    return _narrowed("bf16_compress_wrapper", hook, torch.bfloat16)


def _narrowed(wrapper: str, hook: AnyHook, dtype: torch.dtype) -> Hook:
    if not callable(hook):
        raise HookTypeError(f"{wrapper}: expected a hook, a callable that takes (state, bucket) (got {hook!r}).")
    run = _run_on_wire(hook)

    def hook_on_narrow_wire(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return run(state, bucket, dtype) if run is not None else run_foreign(hook, state, bucket, dtype)

    hook_on_narrow_wire.__qualname__ = f"{wrapper}({name_of(hook)})"  # what ddp_core's errors and logs call it
    if run is not None:
        on_wire[hook_on_narrow_wire] = run
    return hook_on_narrow_wire


def _run_on_wire(hook: AnyHook) -> RunOnWire | None:
    try:
        return on_wire.get(hook)
    except TypeError:  # a callable object without a hash or weak references is none of ours
        return None


def _allreduce_on_wire(process_group: Any, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    return run_stateless(WireDtype(inner=AllReduceMean(), dtype=dtype), process_group, bucket)


on_wire.update(dict.fromkeys((allreduce_hook, fp16_compress_hook, bfloat16_compress_hook), _allreduce_on_wire))
