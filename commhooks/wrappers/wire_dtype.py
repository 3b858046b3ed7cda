"""Cast what another compressor sends, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Mapping

import torch
from torch import Tensor

from commhooks.compressors.cast import check_wire_dtype
from commhooks.errors import CompressorError, SettingsError
from commhooks.language.compressor import BucketView, Compressor, Context, Exchange, carried_by, check_inner
from commhooks.language.requests import AllReduce, Request
from commhooks.state.table import LocalEntry


@dataclasses.dataclass(frozen=True, kw_only=True)
class WireDtype(Compressor):
    """Let `inner`'s sums travel in `dtype`; its residuals, factors and arithmetic keep theirs."""

    inner: Compressor
    dtype: torch.dtype
    """Narrower: smaller messages, fewer digits."""

    def __post_init__(self) -> None:
        check_inner("WireDtype", self.inner)
        check_wire_dtype("WireDtype", self.dtype)
        if self.inner.fixes_wire:
            raise SettingsError(
                f"WireDtype(inner={self.inner!r}): inner must leave the wire's dtype open; this one casts by itself."
            )

    def takes(self, gradient: Tensor) -> bool:
        """Take what `inner` takes, if its values can be cast."""
        return self.inner.takes(gradient) and not gradient.is_sparse

    def check_parameters(self, names: Iterable[str]) -> None:
        """Let `inner` check its settings."""
        self.inner.check_parameters(names)

    def first_steps(self) -> tuple[int, ...]:
        """Return those of `inner`."""
        return self.inner.first_steps()

    def remembers(self, step: int) -> bool:
        """Return what `inner` does."""
        return self.inner.remembers(step)

    def local_entries(self) -> Mapping[str, LocalEntry]:
        """Return those of `inner`."""
        return self.inner.local_entries()

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Pass on `inner`'s requests with the wire's dtype set."""
        narrowed = dataclasses.replace(context, wire=context.wire or self.dtype)  # if two are nested, the outer one's
        return carried_by(self._carry, self.inner.compress(bucket, narrowed))

    def _carry(self, request: Request) -> Generator[Request, Tensor, Tensor]:
        return (yield self._narrowed(request))

    def _narrowed(self, request: Request) -> Request:
        if not isinstance(request, AllReduce):
            raise CompressorError(
                f"WireDtype({self.dtype}): only sums can be cast on the wire, "
                f"and {self.inner} asked for an {request.kind}."
            )
        casts = request.tensor.dtype.itemsize > self.dtype.itemsize
        return dataclasses.replace(request, wire=self.dtype if casts else None)  # a nested one's may be narrower
