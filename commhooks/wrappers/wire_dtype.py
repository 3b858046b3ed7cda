"""A cast of another compressor's messages, and of nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import Any, ClassVar

import torch
from torch import Tensor

from commhooks.compressors.cast import check_wire_dtype
from commhooks.errors import CompressorError
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Compressor, Context, Exchange, map_requests
from commhooks.language.loss import Sends
from commhooks.language.requests import AllReduce, Asked, Judge, Part, Request
from commhooks.language.settings import refusal
from commhooks.language.text import Spelling, short_name, spelled
from commhooks.wrappers.wrapper import Wrapper


@dataclasses.dataclass(frozen=True, kw_only=True)
class WireDtype(Wrapper):
    """A compressor that sends `inner`'s sums in `dtype`; its residuals, factors and arithmetic keep their precision."""

    dtype: torch.dtype
    """Narrower: smaller messages, fewer digits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire_dtype("WireDtype", self.dtype)
        if self.inner.sends == Sends.ANYTHING:
            raise refusal(self, "inner", "must request sums only, since nothing else can be cast")
        if self.inner.sends == Sends.FIXED:
            raise refusal(self, "inner", "must not choose its own wire dtype, as this one does")

    def by_name(self) -> Spelling | None:
        """Return `inner`'s spelling with `wire` among its settings."""
        inner = spelled(self.inner)
        is_free = not inner.has("wire", "start_after") and not hasattr(self.inner, "wire")
        return inner.having(wire=short_name(self.dtype)) if is_free else None

    def takes(self, gradient: Tensor) -> bool:
        """Return whether `inner` takes the gradient and its values can be cast."""
        return self.inner.takes(gradient) and not gradient.is_sparse

    def may_join_buckets(self, step: int) -> bool:
        """Defer to `inner`."""
        return self.inner.may_join_buckets(step)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Pass on `inner`'s requests with the wire dtype set."""
        narrowed = dataclasses.replace(context, wire=context.wire or self.dtype)  # if nested, the outer one decides
        return map_requests(self._carry, self.inner.compress(bucket, narrowed))

    # Refuses: `Cast` averages shards in a narrower dtype.
    scatter: ClassVar[Callable[..., Exchange]] = Compressor.scatter

    def _carry(self, asked: Asked) -> Generator[Asked, Any, Any]:
        if isinstance(asked, Judge):
            return (yield asked)
        return (yield tuple(map(self._narrowed, asked)) if isinstance(asked, tuple) else self._narrowed(asked))

    def _narrowed(self, request: Request) -> Request:
        if not isinstance(request, AllReduce):
            raise CompressorError(
                f"WireDtype({self.dtype}): only sums can be cast on the wire, "
                f"and {self.inner} asked for an {request.kind}."
            )
        return request.with_parts([self._cast(part) for part in request.parts])

    def _cast(self, part: Part) -> Part:
        own = max(part.tensor.dtype, part.wire or part.tensor.dtype, key=lambda dtype: dtype.itemsize)
        wire = self.dtype if own.itemsize > self.dtype.itemsize else own  # a nested one may be narrower
        return dataclasses.replace(part, wire=wire)
