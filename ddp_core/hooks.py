"""PyTorch's communication-hook contract: the callables that may be registered, and the results that they may return.

``hook(state, bucket) -> Future[Tensor]``. The state is the user's; the bucket is a ``GradBucket``.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter

from ddp_core.buckets import views_of
from ddp_core.collectives import finish, future_of, result_of
from ddp_core.errors import HookTimeoutError, listed

Hook = Callable[[Any, Any], Any]


class GradBucket:
    """A bucket as a hook sees it: PyTorch's ``dist.GradBucket``, plus the parameters' names.

    The buffer holds this rank's gradients, not divided by the world size. A hook may write into it.
    """

    def __init__(self, index: int, is_last: bool, buffer: Tensor, members: Sequence[Parameter], names: Sequence[str]):
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._members = members
        self._names = names

    def index(self) -> int:
        """Return the bucket's position in the order of launch, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Return True for the last bucket launched in an iteration."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return the bucket's memory: 1-D, with gradients one after another (or the one sparse gradient)."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the tensor that ``buffer`` and ``gradients`` return."""
        self._buffer = buffer

    def parameters(self) -> list[Parameter]:
        """Return the model's own parameter objects, in the order of the bucket's memory."""
        return list(self._members)

    def names(self) -> list[str]:
        """Return the parameters' names in the wrapped module, in the same order; PyTorch's bucket has no names."""
        return list(self._names)

    def gradients(self) -> list[Tensor]:
        """Return one view of the buffer per parameter, with the parameter's own shape and strides."""
        return [self._buffer] if self._buffer.is_sparse else views_of(self._buffer, self._members)


BUCKETS = (GradBucket, torch._C._distributed_c10d.GradBucket)
RESULTS = (Future, torch._C.Future, dist.Work, Tensor)


class CommHook(NamedTuple):
    """A registered hook with its state, and its name in errors and logs."""

    state: Any
    function: Hook
    name: str
    timeout: float | None = None  # seconds for one bucket's future; None: the process group's timeout

    def start(self, bucket: GradBucket, group: dist.ProcessGroup) -> Pending:
        """Call the hook for one bucket; raise RuntimeError if its result cannot be waited for."""
        try:
            returned = self.function(self.state, bucket)
        except Exception as error:
            error.add_note(f"in {_where(self.name, bucket)}")
            raise
        if not isinstance(returned, RESULTS):
            raise RuntimeError(
                f"{_where(self.name, bucket)}: the callback must return a torch.futures.Future object, but got "
                f"{type(returned).__name__}; a Work or a Tensor is also accepted"
            )
        return Pending(returned, bucket, self.name, group, self.timeout)


class Pending(NamedTuple):
    """A bucket being reduced, with a hook's result for it, or the all-reduce of a model without a hook."""

    returned: Any
    bucket: GradBucket
    name: str
    group: dist.ProcessGroup | None = None  # None: our own all-reduce, which applies its group's timeout itself
    timeout: float | None = None

    def result(self) -> Tensor:
        """Wait for the mean, and return it flattened, in the bucket's size (a sparse bucket's unchanged).

        Raises the future's error, HookTimeoutError if it does not complete in time, and RuntimeError if the result does
        not match the bucket.
        """
        value, buffer = self.returned, self.bucket.buffer()
        if self.group is not None:
            self._await_future(self.group)
        try:
            if isinstance(value, dist.Work) and self.group is not None:
                finish(value)
                return buffer
            if isinstance(value, dist.Work):
                value = result_of(value)
                value = buffer if value is None else value
            elif not isinstance(value, Tensor):
                value = value.wait()
        except Exception as error:
            error.add_note(f"in {_where(self.name, self.bucket)}")
            raise
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, Tensor) or not _fills(value, buffer):
            wanted = _words(buffer) if buffer.is_sparse else f"{buffer.numel()} elements of {_words(buffer)}"
            got = _words(value) if isinstance(value, Tensor) else type(value).__name__
            raise RuntimeError(f"{_where(self.name, self.bucket)}: expected a tensor with {wanted}, got {got}")
        return value if buffer.is_sparse else value.reshape(-1).contiguous()

    def future(self) -> torch._C.Future[Any] | None:
        """Return the future that shows when the hook is done; None for a tensor, or a work that has no future."""
        if isinstance(self.returned, torch._C.Future):
            return self.returned
        if isinstance(self.returned, dist.Work):
            return future_of(self.returned)  # None: it has its group's timeout
        return None

    def _await_future(self, group: dist.ProcessGroup) -> None:
        """Return once the future's own ``wait`` will be short; raise HookTimeoutError if that takes too long."""
        future = self.future()
        if future is None or future.done():
            return
        completed = threading.Event()
        future.add_done_callback(functools.partial(_set, completed))
        limit = timeout_of(group, self.bucket.buffer().device) if self.timeout is None else self.timeout
        if not completed.wait(min(limit, threading.TIMEOUT_MAX)):
            whose = "the process group's timeout" if self.timeout is None else "its hook_timeout"
            raise HookTimeoutError(
                f"rank {group.rank()}: {_where(self.name, self.bucket)}: the future that it returned was not completed "
                f"after {limit:g} s, {whose}. If the link is slow, raise the limit: register_comm_hook(state, hook, "
                "hook_timeout=seconds); if not, a rank is missing, or nothing completes this future."
            )


def _set(event: threading.Event, _future: object) -> None:
    """Set the event, which is all that a future's callback refers to, in case it is never called."""
    event.set()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the timeout of a group's collectives, in seconds."""
    try:
        timeout = group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):  # a group without a backend of PyTorch's does not expose its timeout
        timeout = dist.constants.default_pg_timeout
    return float(timeout.total_seconds())


def _fills(value: Tensor, buffer: Tensor) -> bool:
    size = value.shape == buffer.shape if buffer.is_sparse else value.numel() == buffer.numel() and not value.is_sparse
    return size and value.device == buffer.device and value.is_complex() == buffer.is_complex()


def _words(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.layout} on {tensor.device}"


def _where(hook: str, bucket: GradBucket) -> str:
    return f"communication hook {hook!r}, bucket {bucket.index()} ({listed(bucket.names())})"


def check_timeout(seconds: object) -> None:
    """Raise ValueError unless ``seconds`` is None or a positive, finite number."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < math.inf
    if seconds is not None and not number:
        raise ValueError(
            f"register_comm_hook(hook_timeout={seconds!r}): hook_timeout must be a positive, finite number of seconds, "
            "or None for the process group's timeout."
        )


def check_hook(hook: object) -> None:
    """Raise for anything that cannot be a communication hook.

    Lambdas, ``functools.partial``, bound methods and callable objects are accepted, whatever the name of their second
    argument. Raises TypeError for anything that cannot be called with two arguments, and ValueError if its annotations
    name other types.
    """
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable. (got {type(hook).__name__})")
    try:
        names = list(inspect.signature(hook).bind(None, None).arguments)
    except TypeError as error:  # first: an object's own advice on how to use it may be raised as both types
        remedy = "; register a function, or attach a compressor with commhooks.attach" if isinstance(hook, type) else ""
        raise TypeError(f"communication hook must take (state, bucket); {hook!r} does not: {error}{remedy}") from None
    except ValueError:  # a builtin without a signature: the first call will show
        return
    hints = _type_hints(hook)
    if len(names) == 2 and not _fits(hints.get(names[1], Any), BUCKETS):
        got = f"{names[1]}: {hints[names[1]]!r}"
        raise ValueError(f"Communication hook: bucket annotation should be dist.GradBucket. (got {got})")
    if not _fits(hints.get("return", Any), RESULTS):
        future = "torch.futures.Future[torch.Tensor]"
        raise ValueError(f"Communication hook: return annotation should be {future}. (got {hints['return']!r})")


def _type_hints(hook: Callable[..., Any]) -> dict[str, Any]:
    function = hook if inspect.isroutine(hook) else type(hook).__call__
    try:
        return typing.get_type_hints(function)
    except Exception:  # a name known only to a type checker, for example; annotations that are objects still count
        return {n: a for n, a in getattr(function, "__annotations__", {}).items() if not isinstance(a, str)}


def _fits(annotation: Any, types: tuple[type, ...]) -> bool:
    """Return True for Any, one of ``types``, a subclass or base of one, a generic of one, or a union with one."""
    if annotation is Any or isinstance(annotation, typing.TypeVar) or getattr(annotation, "_is_protocol", False):
        return True
    origin = typing.get_origin(annotation) or annotation
    if isinstance(origin, type) and (issubclass(origin, types) or any(issubclass(t, origin) for t in types)):
        return True
    return any(_fits(argument, types) for argument in typing.get_args(annotation))
