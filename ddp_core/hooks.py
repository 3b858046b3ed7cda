"""PyTorch's communication-hook contract: what may be registered, and what a hook may hand back.

``hook(state, bucket) -> Future[Tensor]``. The state is the user's; the bucket is a :class:`~ddp_core.GradBucket`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ddp_core.bucket import GradBucket

Hook = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class CommHook:
    """A registered hook with its state."""

    state: Any
    function: Hook

    @property
    def name(self) -> str:
        """The name under which errors and logs speak of the hook."""
        return getattr(self.function, "__qualname__", None) or type(self.function).__name__

    def start(self, bucket: GradBucket) -> Pending:
        """Call the hook for one bucket.

        Raises RuntimeError, naming hook and bucket, if it returns something that cannot be waited for.
        """
        returned = self.function(self.state, bucket)
        if not isinstance(returned, (Future, torch._C.Future, dist.Work, Tensor)):
            raise RuntimeError(
                f"communication hook {self.name!r}: the callback must return a torch.futures.Future object, but got "
                f"{type(returned).__name__} for bucket {bucket.index()} ({_shorten(bucket.names())}); a Work or a "
                "Tensor will do as well"
            )
        return Pending(returned, bucket, self.name)


@dataclass(frozen=True)
class Pending:
    """A bucket on its way: what a hook returned, or the all-reduce of a model without one."""

    returned: Any
    bucket: GradBucket
    name: str

    def result(self) -> Tensor:
        """Wait, and return the tensor that came back: as many elements as the bucket (sparse buckets: any layout).

        Raises what the future raises, and RuntimeError if what came is not a tensor of the bucket's size.
        """
        value = self.returned
        if isinstance(value, dist.Work):
            value.wait()
            return self.bucket.buffer()
        if not isinstance(value, Tensor):
            value = value.wait()
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, Tensor):
            raise RuntimeError(self._complaint(f"a {type(value).__name__}"))
        if self.bucket.buffer().is_sparse:
            return value
        if value.numel() != self.bucket.buffer().numel():
            raise RuntimeError(self._complaint(f"a tensor of shape {tuple(value.shape)}"))
        return value.reshape(-1)

    def _complaint(self, what: str) -> str:
        buffer = self.bucket.buffer()
        return (
            f"communication hook {self.name!r}: expected a tensor of {buffer.numel()} elements (dtype {buffer.dtype}) "
            f"for bucket {self.bucket.index()} ({_shorten(self.bucket.names())}), but its future holds {what}"
        )


def check_hook(hook: object) -> None:
    """Refuse what cannot be a communication hook.

    Lambdas, ``functools.partial``, bound methods and callable objects are welcome, whatever their second argument is
    called. Annotations, if there are any, must fit.

    Raises TypeError if it is not callable with two positional arguments; ValueError if an annotation says that it
    takes or returns something else.
    """
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable. (got {type(hook).__name__})")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # a builtin without a signature: the first call will tell
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(f"communication hook must take (state, bucket); {hook!r} does not: {error}") from None
    annotations = _resolved_annotations(hook, signature)
    bucket_annotation = annotations.get(list(signature.parameters)[1] if len(signature.parameters) > 1 else "", Any)
    if not _allowed(bucket_annotation, (GradBucket, torch._C._distributed_c10d.GradBucket)):
        raise ValueError(
            f"Communication hook: bucket annotation should be dist.GradBucket. (or ddp_core.GradBucket; "
            f"got {bucket_annotation!r})"
        )
    returns = annotations.get("return", Any)
    if not _allowed(returns, (Future, torch._C.Future, dist.Work, Tensor)):
        raise ValueError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. (got {returns!r})"
        )


def _resolved_annotations(hook: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """Return the annotations as objects; those that are text and cannot be looked up are left out."""
    function = hook if inspect.isroutine(hook) else type(hook).__call__
    try:
        return typing.get_type_hints(function)
    except Exception:  # names known only to a type checker: nothing to check against
        raw = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        raw["return"] = signature.return_annotation
        return {name: a for name, a in raw.items() if a is not inspect.Signature.empty and not isinstance(a, str)}


def _allowed(annotation: Any, types: tuple[type, ...]) -> bool:
    """Return True for Any, object, one of ``types``, a generic of one, or a union that contains one."""
    if annotation in (Any, object) or isinstance(annotation, (str, typing.TypeVar)):
        return True
    origin = typing.get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, types):
        return True
    if isinstance(annotation, type):
        return issubclass(annotation, types) or any(issubclass(t, annotation) for t in types)
    return any(_allowed(argument, types) for argument in typing.get_args(annotation))


def _shorten(names: list[str], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
