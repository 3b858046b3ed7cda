"""Start compressing after some steps of training."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Set

from torch import Tensor

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.errors import SettingsError
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Compressor, Context, Exchange, never_chooses
from commhooks.language.entries import Declared, ParameterState
from commhooks.language.loss import Loss, Sends
from commhooks.language.settings import setting
from commhooks.language.spelling import Spelling, spelled
from commhooks.wrappers.wrapper import Wrapper


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartAfter(Wrapper):
    """A compressor that runs `before` for the first `steps` steps, and `inner` from then on."""

    steps: int = setting(least=0)
    """Higher: more of the delicate early phase of training is uncompressed."""
    before: Compressor = dataclasses.field(default_factory=AllReduceMean)

    def by_name(self, decay: float | None = None) -> Spelling | None:
        """Return `inner`'s spelling with `start_after` among its settings, if `before` is a plain all-reduce."""
        inner = spelled(self.inner)
        is_free = decay is None and not inner.has("start_after") and not hasattr(self.inner, "start_after")
        is_usual = self.steps > 0 and self.before == AllReduceMean()
        return inner.having(start_after=self.steps) if is_free and is_usual else None

    @property
    def sends(self) -> Sends:
        """What either compressor may request."""
        return max(self.inner.sends, self.before.sends)

    @property
    def needs_whole_buckets(self) -> bool:
        """Whether either compressor must be given whole buckets."""
        return self.inner.needs_whole_buckets or self.before.needs_whole_buckets

    def takes(self, gradient: Tensor) -> bool:
        """Return whether both compressors take the gradient."""
        return self.inner.takes(gradient) and self.before.takes(gradient)

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return the worse of both compressors' losses."""
        return Loss.worst(self.before.loss(name, parameter), self.inner.loss(name, parameter))

    def check(self, named: Mapping[str, Tensor], world_size: int | None) -> None:
        """Let both compressors check their settings."""
        self.inner.check(named, world_size)
        self.before.check(named, world_size)

    def state(self, name: str, parameter: Tensor, world_size: int) -> Declared:
        """Return the entries of both compressors; those declared identically, such as a residual, are shared."""
        before, inner = self.before.state(name, parameter, world_size), self.inner.state(name, parameter, world_size)
        apart = self._names_of_before(name, parameter)
        return {apart.get(entry, entry): what for entry, what in before.items()} | dict(inner)

    def bucket_state(self, bucket: BucketView) -> Declared:
        """Return the entries of both compressors; those that both declare identically are shared."""
        before, inner = self.before.bucket_state(bucket), self.inner.bucket_state(bucket)
        apart = _kept_apart(before, inner)
        return {apart.get(entry, entry): what for entry, what in before.items()} | dict(inner)

    def remembers(self, step: int) -> bool:
        """Return whether the current compressor uses state in this step."""
        return self._in_turn(step).remembers(step)

    def phase(self, step: int) -> int:
        """Return 1 from `steps` on, and 0 before, plus the phases of both compressors."""
        return self.before.phase(step) + self.inner.phase(step) + (step >= self.steps)

    def resting(self, name: str, parameter: Tensor, world_size: int, step: int) -> Set[str]:
        """Return all entries but those that the current compressor uses."""
        where = name, parameter, world_size
        current, renamed = self._in_turn(step), {} if step >= self.steps else self._names_of_before(name, parameter)
        in_use = current.state(*where).keys() - current.resting(*where, step)
        return self.state(*where).keys() - {renamed.get(entry, entry) for entry in in_use}

    def choose(self, states: Mapping[Tensor, ParameterState], step: int) -> Mapping[Tensor, int]:
        """Let the current compressor choose, given the state under its own names."""
        if step >= self.steps or never_chooses(self.before):
            return self._in_turn(step).choose(states, step)
        own = {p: state.renamed(self._names_of_before(state.key, p)) for p, state in states.items()}
        return self.before.choose(own, step)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Pass the bucket to the current compressor."""
        return self._in_turn(context.step).compress(self._in_own_names(bucket, context), context)

    @property
    def scatters(self) -> bool:
        """Whether both compressors do."""
        return self.inner.scatters and self.before.scatters

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Pass the bucket to the current compressor."""
        return self._in_turn(context.step).scatter(self._in_own_names(bucket, context), context)

    def _in_own_names(self, bucket: BucketView, context: Context) -> BucketView:
        """Return the bucket with state under the names that the current compressor declared."""
        if context.step >= self.steps:
            return bucket
        return bucket.plan(self, lambda: self._bucket_of_before(bucket, context)) or bucket

    def _bucket_of_before(self, bucket: BucketView, context: Context) -> BucketView | None:
        """Return the bucket with the state private to `before` under its own names; None if there is none.

        None rather than the bucket itself, since this is kept in the bucket's plans and would form a cycle.
        """
        names: dict[Slot, dict[str, str]] = {}
        for slot in bucket.slots:
            names[slot] = self._names_of_before(slot.name, slot.parameter)
        if bucket.slots:
            of_bucket = _kept_apart(self.before.bucket_state(bucket), self.inner.bucket_state(bucket))
            names[bucket.slots[0]] |= of_bucket
        return bucket.renamed(names.__getitem__) if any(names.values()) else None

    def _names_of_before(self, name: str, parameter: Tensor) -> dict[str, str]:
        """Return the names under which a parameter's state private to `before` is kept, with any number of ranks.

        One rank declares all that any number of ranks may: two hops drop entries if there are too many for the codes.
        """
        return _kept_apart(self.before.state(name, parameter, 1), self.inner.state(name, parameter, 1))

    def _in_turn(self, step: int) -> Compressor:
        return self.before if step < self.steps else self.inner


def schedule(*phases: tuple[int, Compressor]) -> Compressor:
    """Return a compressor that switches at the given steps: `schedule((0, a), (100, b), (500, c))`.

    The first phase begins at step 0. State that phases declare identically is shared: a residual continues from one to
    the next, and a ratio or a rank may change without losing it. What a phase owes in other state, such as the server
    error of blocks of another length, is added to the next one's residual. Raises `SettingsError` if steps do not
    ascend from 0.
    """
    steps = [step for step, _ in phases]
    if not steps or steps[0] != 0 or any(step >= later for step, later in itertools.pairwise(steps)):
        raise SettingsError(f"schedule: phases must begin at steps that ascend from 0 (got {steps}).")
    compressor = phases[-1][1]
    for (_, before), (step, _) in zip(phases[-2::-1], phases[:0:-1], strict=True):
        compressor = StartAfter(inner=compressor, steps=step, before=before)
    return compressor


def _kept_apart(before: Declared, inner: Declared) -> dict[str, str]:
    """Map entries that the two declare differently to the names under which those of `before` are kept."""
    apart: dict[str, str] = {}
    for name, entry in before.items():
        if name in inner and not entry.is_like(inner[name]):
            kept = f"{name} before"
            while kept in before or kept in inner or kept in apart.values():  # a StartAfter inside this one uses it
                kept += " before"
            apart[name] = kept
    return apart
