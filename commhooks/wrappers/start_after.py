"""Begin compressing some steps into the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.errors import SettingsError
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Compressor, Context, Exchange
from commhooks.language.entries import Declared
from commhooks.wrappers.wrapper import Wrapper


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartAfter(Wrapper):
    """Run `before` for the first `steps` steps, and `inner` from then on."""

    steps: int
    """Higher: more of the delicate first phase of training goes uncompressed."""
    before: Compressor = dataclasses.field(default_factory=AllReduceMean)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_compressor("before", self.before)
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 0:
            raise SettingsError(f"StartAfter(steps={self.steps!r}): steps must be an integer of at least 0.")

    @property
    def fixes_wire(self) -> bool:
        """Whether either compressor chooses its wire dtype itself."""
        return self.inner.fixes_wire or self.before.fixes_wire

    def takes(self, gradient: Tensor) -> bool:
        """Take what both compressors take."""
        return self.inner.takes(gradient) and self.before.takes(gradient)

    def check_parameters(self, named: Mapping[str, Tensor]) -> None:
        """Let both compressors check their settings."""
        self.inner.check_parameters(named)
        self.before.check_parameters(named)

    def state(self, name: str, parameter: Tensor, world_size: int) -> Declared:
        """Return those of both compressors."""
        return {**self.before.state(name, parameter, world_size), **self.inner.state(name, parameter, world_size)}

    def bucket_state(self, bucket: BucketView) -> Declared:
        """Return those of both compressors."""
        return {**self.before.bucket_state(bucket), **self.inner.bucket_state(bucket)}

    def remembers(self, step: int) -> bool:
        """Return what the one does that has its turn."""
        return self._in_turn(step).remembers(step)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Hand the bucket to whichever compressor has its turn."""
        return self._in_turn(context.step).compress(bucket, context)

    def _in_turn(self, step: int) -> Compressor:
        return self.before if step < self.steps else self.inner
