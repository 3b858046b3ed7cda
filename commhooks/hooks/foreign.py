"""Third-party hooks, run on a bucket in another dtype; whatever they do, the bucket keeps its own memory."""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from commhooks.devices import future_on
from commhooks.errors import CompressorError, GradientError
from ddp_core.guard import hook_ran

AnyHook = Callable[[Any, Any], Any]
"""A third-party hook; it need not have the signature that PyTorch requires."""


def run_foreign(hook: AnyHook, state: Any, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    """Run a hook on the bucket cast to `dtype`, and write its result into the bucket's own memory."""
    hook_ran(bucket)
    own = bucket.buffer()
    if not (own.is_floating_point() or own.is_complex()):
        raise GradientError(
            f"{_where(hook, bucket)}: gradients are of {own.dtype}; a mean needs a floating-point or complex dtype."
        )
    write_back = functools.partial(_write_back, hook, own, bucket)
    bucket.set_buffer(own.to(dtype) if _narrows(own, dtype) else own)
    try:
        returned = hook(state, bucket)
        return _future_of(returned, bucket).then(write_back)  # never `returned` itself: PyTorch's DDP crashes on None
    except Exception as error:
        bucket.set_buffer(own)
        raise _failure(hook, bucket, error) from error


def _narrows(own: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast makes the bucket smaller and keeps its content."""
    # A cast to a real dtype drops the imaginary parts, and sparse fp16 tensors cannot be added on the CPU.
    return not own.is_sparse and not own.is_complex() and dtype.itemsize < own.element_size()


def _future_of(returned: Any, bucket: GradBucket) -> torch.futures.Future[Any]:
    if isinstance(returned, dist.Work):
        return _future_of_work(returned, bucket)
    if isinstance(returned, Tensor):
        return completed(returned)
    if not isinstance(returned, torch._C.Future):
        raise TypeError(
            "expected a torch.futures.Future, a Tensor or a torch.distributed.Work to be returned "
            f"(got {type(returned).__name__})"
        )
    return cast("torch.futures.Future[Any]", returned)


def _future_of_work(work: dist.Work, bucket: GradBucket) -> torch.futures.Future[Any]:
    try:
        future = work.get_future()
    except RuntimeError:  # "not implemented": a Work written in Python may have no future, but can be waited for
        work.wait()
        return completed(bucket.buffer())
    return future.then(functools.partial(_buffer_of, bucket))


def completed(value: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future that already holds `value`."""
    future = future_on(value.device)
    future.set_result(value)
    return future


def _buffer_of(bucket: GradBucket, future: torch.futures.Future[Any]) -> Tensor:
    """Return the bucket's buffer once a Work is done."""
    future.value()  # raises the Work's error, if it failed
    return bucket.buffer()


@torch.no_grad()  # a Gloo thread calls this, and grad mode is on by default in every thread
def _write_back(hook: AnyHook, own: Tensor, bucket: GradBucket, future: torch.futures.Future[Any]) -> Tensor:
    """Write a future's value into the bucket's own memory, and restore that as the buffer."""
    try:
        own.copy_(_mean_in(future.value(), own))
    except Exception as error:
        raise _failure(hook, bucket, error) from error
    finally:
        bucket.set_buffer(own)
    return own


def _mean_in(value: Any, own: Tensor) -> Tensor:
    """Return the mean that a future holds, in the shape of the bucket's memory."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, Tensor) and own.is_complex() and value.shape == (*own.shape, 2):
        value = torch.view_as_complex(value)  # a process group sums complex numbers as pairs of real numbers
    if not isinstance(value, Tensor) or not _fills(value, own):
        got = _words(value) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"expected its future to hold a tensor that matches the bucket's {_words(own)} (got {got})")
    return value if own.is_sparse else value.reshape(own.shape)


def _fills(value: Tensor, own: Tensor) -> bool:
    """Return whether `value` matches `own` element for element; `copy_` itself would also broadcast."""
    size = value.shape == own.shape if own.is_sparse else value.numel() == own.numel()
    layout = value.layout == own.layout and value.is_complex() == own.is_complex()
    return size and layout and value.device == own.device


def _words(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.layout} on {tensor.device}"


def _failure(hook: AnyHook, bucket: GradBucket, error: Exception) -> CompressorError:
    return CompressorError(f"{_where(hook, bucket)} failed: {type(error).__name__}: {error}")


def _where(hook: AnyHook, bucket: GradBucket) -> str:
    names = getattr(bucket, "names", None)  # ddp_core's bucket has names, PyTorch's has none
    members = names() if names is not None else [f"one of shape {tuple(p.shape)}" for p in bucket.parameters()]
    more = f" and {len(members) - 8} more" if len(members) > 8 else ""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"rank {rank}, bucket {bucket.index()} (parameters {', '.join(members[:8])}{more}): hook {name_of(hook)}"


def name_of(hook: AnyHook) -> str:
    """Return the name by which errors refer to a hook."""
    return getattr(hook, "__qualname__", None) or repr(hook)
