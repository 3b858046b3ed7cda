"""PyTorch's default communication hooks, under PyTorch's names: to migrate, change the import.

Use them as `model.register_comm_hook(process_group, hook)` on ddp_core's or PyTorch's DDP; `process_group` may be None
for the default group. hook_functions.py explains what PyTorch requires of these functions.
"""

import contextlib
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from commhooks.compressors import Affine, AllReduceMean, Cast
from commhooks.errors import HookTypeError
from commhooks.hooks.foreign import AnyHook, completed, name_of, run_foreign
from commhooks.hooks.hook_functions import run_stateless
from commhooks.language.compressor import Compressor, no_hook
from commhooks.wrappers import WireDtype
from ddp_core.guard import hook_ran

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]
RunOnWire = Callable[[Any, GradBucket, torch.dtype], torch.futures.Future[Tensor]]

on_wire: MutableMapping[Callable[..., Any], RunOnWire] = weakref.WeakKeyDictionary()
"""The function that runs each of our hooks, wrapped or not, with its messages cast to a dtype."""


def allreduce_hook(process_group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the bucket without compression."""
    return run_stateless(AllReduceMean(), process_group, bucket)


def fp16_compress_hook(process_group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the bucket with fp16 on the wire, dividing before the cast."""
    return run_stateless(Cast(dtype=torch.float16), process_group, bucket)


def bfloat16_compress_hook(process_group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the bucket with bf16 on the wire, on every backend that can sum bf16, Gloo included."""
    return run_stateless(Cast(dtype=torch.bfloat16), process_group, bucket)


# Except with NCCL, PyTorch's DDP rejects a function whose *name* is bf16_compress_hook (tests/commhooks/test_hooks.py).
bf16_compress_hook = bfloat16_compress_hook


def quantization_pertensor_hook(process_group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average 8-bit codes of the bucket, which share one scale; every rank gathers the codes of all ranks."""
    return run_stateless(Affine(), process_group, bucket)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[Tensor]:
    """Average 8-bit codes of the bucket, with one scale for every `bucket_size` elements."""
    return run_stateless(Affine(channel=bucket_size), process_group, bucket)


def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return the bucket unchanged, without communication. Replicas drift apart, so use it for measurements only."""
    hook_ran(bucket)
    return completed(bucket.buffer())


def fp16_compress_wrapper(hook: AnyHook) -> Hook:
    """Return `hook` with fp16 on the wire.

    If it is a hook of this package, only its messages are cast; residuals and arithmetic keep their precision. Any
    other hook receives the bucket cast to fp16 (elements beyond 65504 become inf), and its result is cast back to the
    bucket's dtype. Such a hook may be any callable that returns a Future of a Tensor or of a list of one Tensor, a
    Tensor, or the Work of an all-reduce of the bucket; this also holds on PyTorch's DDP. A bucket that is sparse,
    complex, or would not get smaller is passed on uncast. If wrappers are nested, the outermost decides the dtype on
    the wire.

    Raises `HookTypeError` if `hook` is not callable. When the returned hook runs, it raises `GradientError` for an
    integer bucket, and `CompressorError` if `hook` fails or returns something else (a `RuntimeError` with the same text
    if only its future fails).
    """
    return _narrowed("fp16_compress_wrapper", hook, torch.float16)


def bf16_compress_wrapper(hook: AnyHook) -> Hook:
    """Return `hook` with bf16 on the wire; see `fp16_compress_wrapper`. bf16 has the range of fp32."""
    return _narrowed("bf16_compress_wrapper", hook, torch.bfloat16)


def _narrowed(wrapper: str, hook: AnyHook, dtype: torch.dtype) -> Hook:
    if isinstance(hook, Compressor) or (isinstance(hook, type) and issubclass(hook, Compressor)):
        raise no_hook(hook)
    if not callable(hook):
        raise HookTypeError(f"{wrapper}: expected a hook, a callable that takes (state, bucket) (got {hook!r}).")
    run: RunOnWire | None = None
    with contextlib.suppress(TypeError):  # not hashable or not weakly referenceable, so not ours
        run = on_wire.get(hook)

    def hook_on_narrow_wire(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return run(state, bucket, dtype) if run is not None else run_foreign(hook, state, bucket, dtype)

    hook_on_narrow_wire.__qualname__ = f"{wrapper}({name_of(hook)})"  # the name in ddp_core's errors and logs
    if run is not None:
        on_wire[hook_on_narrow_wire] = run
    return hook_on_narrow_wire


def _allreduce_on_wire(process_group: Any, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    return run_stateless(WireDtype(inner=AllReduceMean(), dtype=dtype), process_group, bucket)


on_wire.update(dict.fromkeys((allreduce_hook, fp16_compress_hook, bfloat16_compress_hook), _allreduce_on_wire))
