"""The base class of wrappers, each of which takes a compressor and is a compressor itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Compressor, Context, Exchange
from commhooks.language.entries import Declared, ParameterState
from commhooks.language.loss import Loss, Sends
from commhooks.language.place import Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper(Compressor):
    """A compressor that behaves as `inner` does; subclasses override methods."""

    inner: Compressor

    @property
    def sends(self) -> Sends:
        """Defer to `inner`."""
        return self.inner.sends

    def takes(self, gradient: Tensor) -> bool:
        """Defer to `inner`."""
        return self.inner.takes(gradient)

    def may_join_buckets(self, step: int) -> bool:
        """Defer to `inner`; a subclass that does something with buckets itself inherits no answer."""
        return self.inner.may_join_buckets(step)

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Defer to `inner`."""
        return self.inner.loss(name, parameter)

    def why_whole(self, place: Place) -> str | None:
        """Defer to `inner`."""
        return self.inner.why_whole(place)

    def check(self, named: Mapping[str, Tensor], world_size: int | None) -> None:
        """Defer to `inner`."""
        self.inner.check(named, world_size)

    def state(self, place: Place) -> Declared:
        """Defer to `inner`."""
        return self.inner.state(place)

    def choose(self, states: Mapping[Tensor, ParameterState], step: int) -> Mapping[Tensor, int]:
        """Defer to `inner`."""
        return self.inner.choose(states, step)

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Defer to `inner`."""
        return self.inner.scatter(bucket, context)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Defer to `inner`."""
        return self.inner.compress(bucket, context)
