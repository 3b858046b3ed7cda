"""Begin compressing some steps into the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torch import Tensor

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.errors import SettingsError
from commhooks.language.compressor import BucketView, Compressor, Context, Exchange, check_inner
from commhooks.state.table import LocalEntry


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartAfter(Compressor):
    """Run `before` for the first `steps` steps, and `inner` from then on."""

    inner: Compressor
    steps: int
    """Higher: more of the delicate first phase of training goes uncompressed."""
    before: Compressor = dataclasses.field(default_factory=AllReduceMean)

    def __post_init__(self) -> None:
        check_inner("StartAfter", self.inner)
        check_inner("StartAfter", self.before)
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 0:
            raise SettingsError(f"StartAfter(steps={self.steps!r}): steps must be an integer of at least 0.")

    @property
    def fixes_wire(self) -> bool:
        """Whether either compressor chooses its wire dtype itself."""
        return self.inner.fixes_wire or self.before.fixes_wire

    def takes(self, gradient: Tensor) -> bool:
        """Take what both compressors take."""
        return self.inner.takes(gradient) and self.before.takes(gradient)

    def check_parameters(self, names: Iterable[str]) -> None:
        """Let both compressors check their settings."""
        known = list(names)
        self.inner.check_parameters(known)
        self.before.check_parameters(known)

    def first_steps(self) -> tuple[int, ...]:
        """Return those of both compressors, each in its turn."""
        turn = [step for step in self.before.first_steps() if step < self.steps]
        return (*turn, *(self.steps + step for step in self.inner.first_steps()))

    def remembers(self, step: int) -> bool:
        """Return what the one does that has its turn."""
        return self._in_turn(step).remembers(step)

    def local_entries(self) -> Mapping[str, LocalEntry]:
        """Return those of both compressors."""
        return {**self.before.local_entries(), **self.inner.local_entries()}

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Hand the bucket to whichever compressor has its turn."""
        return self._in_turn(context.step).compress(bucket, context)

    def _in_turn(self, step: int) -> Compressor:
        return self.before if step < self.steps else self.inner
