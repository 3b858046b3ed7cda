"""PyTorch's default communication hooks, under PyTorch's names: changing an import is the whole migration.

For `model.register_comm_hook(process_group, hook)` on ddp_core's DDP or PyTorch's; `process_group` may be None for the
default group. See hook.py for what PyTorch demands of these functions.
"""

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from commhooks.compressors import AllReduceMean, Cast
from commhooks.errors import CompressorError, GradientError, SettingsError
from commhooks.hook import Hook, run_stateless
from commhooks.wrappers import WireDtype

AnyHook = Callable[[Any, Any], Any]
"""A hook that somebody else wrote: it need not look as PyTorch wants it."""

RunOnWire = Callable[[Any, GradBucket, torch.dtype], torch.futures.Future[Tensor]]

on_wire: MutableMapping[Callable[..., Any], RunOnWire] = weakref.WeakKeyDictionary()
"""For each hook of ours, wrapped or not: how to run it with what it sends cast to a dtype."""


class HookTypeError(SettingsError, TypeError):
    """Refuse something of the wrong type in the place of a hook, a hook's type, a model or a process group."""


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
    return _completed(bucket.buffer())


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
        return run(state, bucket, dtype) if run is not None else _run_foreign(hook, state, bucket, dtype)

    hook_on_narrow_wire.__qualname__ = f"{wrapper}({_name_of(hook)})"  # what ddp_core's errors and logs call it
    if run is not None:
        on_wire[hook_on_narrow_wire] = run
    return hook_on_narrow_wire


def _run_on_wire(hook: AnyHook) -> RunOnWire | None:
    try:
        return on_wire.get(hook)
    except TypeError:  # a callable object without a hash or weak references is none of ours
        return None


# --- hooks that are not ours ------------------------------------------------------------------------------------------


def _run_foreign(hook: AnyHook, state: Any, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    """Hand a hook the bucket in `dtype`, and write what it returns into the bucket's own memory."""
    own = bucket.buffer()
    if not (own.is_floating_point() or own.is_complex()):
        raise GradientError(
            f"{_where(hook, bucket)}: gradients are of {own.dtype}; a mean needs a floating-point or complex dtype."
        )
    write_back = _WriteBack(hook, own, bucket)
    bucket.set_buffer(own.to(dtype) if _narrows(own, dtype) else own)
    try:
        returned = hook(state, bucket)
        return _future_of(returned, bucket).then(write_back)  # not on to PyTorch's DDP as it is: None crashes there
    except Exception as error:
        bucket.set_buffer(own)
        raise _failure(hook, bucket, error) from error


def _narrows(own: Tensor, dtype: torch.dtype) -> bool:
    """Say whether a cast makes the bucket smaller, and keeps what is in it."""
    # Cast to a real dtype, a complex number loses a half; sparse fp16 cannot be added on the CPU.
    return not own.is_sparse and not own.is_complex() and dtype.itemsize < own.element_size()


def _future_of(returned: Any, bucket: GradBucket) -> torch.futures.Future[Any]:
    if isinstance(returned, dist.Work):
        return _future_of_work(returned, bucket)
    if isinstance(returned, Tensor):
        return _completed(returned)
    if not isinstance(returned, torch._C.Future):
        raise TypeError(
            "expected a torch.futures.Future, a Tensor or a torch.distributed.Work to be returned "
            f"(got {type(returned).__name__})"
        )
    return cast("torch.futures.Future[Any]", returned)


def _future_of_work(work: dist.Work, bucket: GradBucket) -> torch.futures.Future[Any]:
    try:
        future = work.get_future()
    except RuntimeError:  # "not implemented": a Work of somebody else's need not have one, but it can be waited for
        work.wait()
        return _completed(bucket.buffer())
    return future.then(_BufferOf(bucket))


def _completed(value: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[value.device] if value.is_cuda else None)
    future.set_result(value)
    return future


class _BufferOf:
    """Give the bucket's buffer when a Work is done; a class, so that nothing is defined inside a function."""

    def __init__(self, bucket: GradBucket) -> None:
        self._bucket = bucket

    def __call__(self, future: torch.futures.Future[Any]) -> Tensor:
        future.value()  # raises what the Work failed with
        return self._bucket.buffer()


class _WriteBack:
    """Write a future's value into the bucket's own memory, and give the bucket that memory back."""

    def __init__(self, hook: AnyHook, own: Tensor, bucket: GradBucket) -> None:
        self._hook = hook
        self._own = own
        self._bucket = bucket

    @torch.no_grad()  # a thread of Gloo's calls this, where gradients are recorded
    def __call__(self, future: torch.futures.Future[Any]) -> Tensor:
        try:
            self._own.copy_(_mean_in(future.value(), self._own))
        except Exception as error:
            raise _failure(self._hook, self._bucket, error) from error
        finally:
            self._bucket.set_buffer(self._own)
        return self._own


def _mean_in(value: Any, own: Tensor) -> Tensor:
    """Return the mean that a future held, in the shape of the bucket's own memory."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if isinstance(value, Tensor) and own.is_complex() and value.shape == (*own.shape, 2):
        value = torch.view_as_complex(value)  # a process group sums pairs of reals, and its future holds those
    if not isinstance(value, Tensor) or not _fills(value, own):
        got = _words(value) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"expected its future to hold a tensor that fits the bucket's {_words(own)} (got {got})")
    return value if own.is_sparse else value.reshape(own.shape)


def _fills(value: Tensor, own: Tensor) -> bool:
    """Say whether `value` has an element for each of `own`'s; `copy_` alone would stretch a single one over all."""
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
    return f"rank {rank}, bucket {bucket.index()} (parameters {', '.join(members[:8])}{more}): hook {_name_of(hook)}"


def _name_of(hook: AnyHook) -> str:
    return getattr(hook, "__qualname__", None) or repr(hook)


# --- our hooks, narrowed ----------------------------------------------------------------------------------------------


def _allreduce_on_wire(process_group: Any, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    return run_stateless(WireDtype(inner=AllReduceMean(), dtype=dtype), process_group, bucket)


on_wire.update(dict.fromkeys((allreduce_hook, fp16_compress_hook, bfloat16_compress_hook), _allreduce_on_wire))
