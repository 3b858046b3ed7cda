"""What wrappers have in common: each takes a compressor and is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Compressor, Context, Exchange
from commhooks.language.entries import Declared, ParameterState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper(Compressor):
    """Do as `inner` does; subclasses change what they are there for."""

    inner: Compressor

    def __post_init__(self) -> None:
        self.check_compressor("inner", self.inner)

    def check_compressor(self, field: str, value: object) -> None:
        """Raise `SettingsError` for what cannot be wrapped."""
        if not isinstance(value, Compressor):
            raise SettingsError(
                f"{type(self).__name__}({field}={value!r}): {field} must be a Compressor; make one of a name with "
                "make_compressor."
            )

    @property
    def fixes_wire(self) -> bool:
        """As `inner`."""
        return self.inner.fixes_wire

    @property
    def only_sums(self) -> bool:
        """As `inner`."""
        return self.inner.only_sums

    @property
    def needs_whole_buckets(self) -> bool:
        """As `inner`."""
        return self.inner.needs_whole_buckets

    @property
    def takes_feedback(self) -> bool:
        """As `inner`."""
        return self.inner.takes_feedback

    def takes(self, gradient: Tensor) -> bool:
        """As `inner`."""
        return self.inner.takes(gradient)

    def check_parameters(self, named: Mapping[str, Tensor]) -> None:
        """As `inner`."""
        self.inner.check_parameters(named)

    def check_ranks(self, world_size: int) -> None:
        """As `inner`."""
        self.inner.check_ranks(world_size)

    def state(self, name: str, parameter: Tensor, world_size: int) -> Declared:
        """As `inner`."""
        return self.inner.state(name, parameter, world_size)

    def bucket_state(self, bucket: BucketView) -> Declared:
        """As `inner`."""
        return self.inner.bucket_state(bucket)

    def remembers(self, step: int) -> bool:
        """As `inner`."""
        return self.inner.remembers(step)

    def chooses(self, step: int) -> bool:
        """As `inner`."""
        return self.inner.chooses(step)

    def choose(self, states: Mapping[Tensor, ParameterState], step: int) -> Mapping[Tensor, int]:
        """As `inner`."""
        return self.inner.choose(states, step)

    def loses(self, name: str, parameter: Tensor) -> bool:
        """As `inner`."""
        return self.inner.loses(name, parameter)

    def relative_error(self, elements: int) -> float:
        """As `inner`."""
        return self.inner.relative_error(elements)

    @property
    def is_unbiased(self) -> bool:
        """As `inner`."""
        return self.inner.is_unbiased

    @property
    def is_damped(self) -> bool:
        """As `inner`."""
        return self.inner.is_damped

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """As `inner`."""
        return self.inner.compress(bucket, context)
