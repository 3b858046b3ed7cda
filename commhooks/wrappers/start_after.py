"""Start compressing after some steps of training."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from torch import Tensor

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.errors import SettingsError
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Compressor, Context, Exchange, never_chooses
from commhooks.language.entries import Declared, ParameterState
from commhooks.language.loss import Loss, Sends
from commhooks.language.place import Place
from commhooks.language.settings import setting
from commhooks.language.text import Spelling, spelled
from commhooks.wrappers.wrapper import Wrapper


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartAfter(Wrapper):
    """A compressor that runs `before` for the first `steps` steps, and `inner` from then on."""

    steps: int = setting(least=0)
    """Higher: more of the delicate early phase of training is uncompressed."""
    before: Compressor = dataclasses.field(default_factory=AllReduceMean)

    def by_name(self) -> Spelling | None:
        """Return `inner`'s spelling with `start_after` among its settings, if `before` is a plain all-reduce."""
        inner = spelled(self.inner)
        is_free = not inner.has("start_after") and not hasattr(self.inner, "start_after")
        is_usual = self.steps > 0 and self.before == AllReduceMean()
        return inner.having(start_after=self.steps) if is_free and is_usual else None

    @property
    def sends(self) -> Sends:
        """The wider of the compressors' `sends`."""
        return max(self.inner.sends, self.before.sends)

    def takes(self, gradient: Tensor) -> bool:
        """Return whether both compressors take the gradient."""
        return self.inner.takes(gradient) and self.before.takes(gradient)

    def may_join_buckets(self, step: int) -> bool:
        """Return the answer of the compressor that runs in the step."""
        return self.in_turn(step).may_join_buckets(step)

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return the worse of both compressors' losses."""
        return Loss.worst(self.before.loss(name, parameter), self.inner.loss(name, parameter))

    def check(self, named: Mapping[str, Tensor], world_size: int | None) -> None:
        """Check both compressors' settings."""
        self.inner.check(named, world_size)
        self.before.check(named, world_size)

    def state(self, place: Place) -> Declared:
        """Return the entries of both compressors, or of the one that runs in `place.step`.

        Entries that both declare identically, such as a residual, are shared.
        """
        apart = self._names_of_before(place)
        before = {apart.get(entry, entry): what for entry, what in self.before.state(place).items()}
        if place.step is None:
            return {**before, **self.inner.state(place)}
        return before if place.step < self.steps else self.inner.state(place)

    def choose(self, states: Mapping[Tensor, ParameterState], step: int) -> Mapping[Tensor, int]:
        """Return the current compressor's choices, given the state under its own names."""
        if step >= self.steps or never_chooses(self.before):
            return self.in_turn(step).choose(states, step)
        own = {p: state.renamed(self._names_of_before(Place(state.key, p, 1))) for p, state in states.items()}
        return self.before.choose(own, step)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Pass the bucket to the current compressor."""
        return self.in_turn(context.step).compress(self._in_own_names(bucket, context), context)

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Pass the bucket to the current compressor."""
        return self.in_turn(context.step).scatter(self._in_own_names(bucket, context), context)

    def in_turn(self, step: int) -> Compressor:
        """Return the compressor that runs in a step."""
        return self.before if step < self.steps else self.inner

    def _in_own_names(self, bucket: BucketView, context: Context) -> BucketView:
        """Return the bucket with state under the names that the current compressor declared."""
        if context.step >= self.steps:
            return bucket
        return bucket.plan(self, lambda: self._bucket_of_before(bucket)) or bucket

    def _bucket_of_before(self, bucket: BucketView) -> BucketView | None:
        """Return the bucket with the state private to `before` under its own names; None if there is none.

        None rather than the bucket itself, since this is kept in the bucket's plans and would form a cycle.
        """
        names = [self._names_of_before(place) for place in bucket.places(1)]
        return bucket.renamed(names) if any(names) else None

    def _names_of_before(self, place: Place) -> dict[str, str]:
        """Return the names under which state private to `before` is kept, with any number of ranks and in any step.

        One rank declares all that any number of ranks may: two hops drop entries if there are too many for the codes.
        """
        always = dataclasses.replace(place, world_size=1, step=None)
        return _kept_apart(self.before.state(always), self.inner.state(always))


def schedule(*phases: tuple[int, Compressor]) -> Compressor:
    """Return a compressor that switches at the given steps: `schedule((0, a), (100, b), (500, c))`.

    The first phase begins at step 0. State that phases declare identically is shared: a residual continues from one to
    the next, and a ratio or a rank may change without losing it. Unsent values in other state, such as the server error
    of blocks of another length, are added to the next phase's residual. Raises `SettingsError` if steps do not ascend
    from 0.
    """
    steps = [step for step, _ in phases]
    if not steps or steps[0] != 0 or any(step >= later for step, later in itertools.pairwise(steps)):
        raise SettingsError(f"schedule: phases must begin at steps that ascend from 0 (got {steps}).")
    compressor = phases[-1][1]
    for (_, before), (step, _) in zip(phases[-2::-1], phases[:0:-1], strict=True):
        compressor = StartAfter(inner=compressor, steps=step, before=before)
    return compressor


def _kept_apart(before: Declared, inner: Declared) -> dict[str, str]:
    """Map entries that both declare, but differently, to the names under which `before`'s are kept."""
    apart: dict[str, str] = {}
    for name, entry in before.items():
        if name in inner and not entry.is_like(inner[name]):
            kept = f"{name} before"
            while kept in before or kept in inner or kept in apart.values():  # a StartAfter inside this one uses it
                kept += " before"
            apart[name] = kept
    return apart
