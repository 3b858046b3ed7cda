"""Different compressors for different parameters."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.errors import SettingsError
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import (
    Compressor,
    Context,
    Exchange,
    begin_exchange,
    judged,
    loss_of_a_matrix,
    never_chooses,
    side_by_side,
)
from commhooks.language.entries import Declared, ParameterState
from commhooks.language.loss import Loss, Sends
from commhooks.language.place import Place
from commhooks.language.settings import check_settings, refusal, setting
from commhooks.language.text import spelled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """The conditions that a parameter must meet, all of them, for a rule of `PerParameter`."""

    name: str = "*"
    """A shell pattern for its name, such as "head.*"."""
    min_elements: int = setting(0, least=0)
    max_elements: int | None = setting(None, least=0)
    """Limits on its number of elements, inclusive; None: no limit."""
    dimensions: tuple[int, ...] = ()
    """The allowed numbers of dimensions, such as (2, 4) for matrices and convolutions; empty: any number."""
    dtype: torch.dtype | None = None
    """The required dtype; None: any."""

    def __post_init__(self) -> None:
        check_settings(self)
        if not isinstance(self.dimensions, tuple) or not all(isinstance(one, int) for one in self.dimensions):
            raise refusal(self, "dimensions", "must be a tuple of ints")
        if self.max_elements is not None and self.max_elements < self.min_elements:
            raise refusal(self, "max_elements", f"must be at least min_elements={self.min_elements}")

    def __str__(self) -> str:
        """Return text that `make_compressor` can parse inside a compressor."""
        return str(spelled(self))

    def matches(self, name: str, parameter: Tensor) -> bool:
        """Return whether a parameter meets all conditions."""
        limit = parameter.numel() if self.max_elements is None else self.max_elements
        return (
            fnmatch.fnmatchcase(name, self.name)
            and self.min_elements <= parameter.numel() <= limit
            and (not self.dimensions or parameter.dim() in self.dimensions)
            and self.dtype in (None, parameter.dtype)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerParameter(Compressor):
    """A compressor that passes each parameter to the first rule that matches it, or else to `otherwise`.

    A step takes as many rounds as the compressor that needs most, not the sum of all.
    """

    rules: tuple[tuple[str | Match, Compressor], ...]
    """Shell patterns for names, such as "head.*", or `Match`, each with its compressor."""
    otherwise: Compressor = dataclasses.field(default_factory=AllReduceMean)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rules, tuple) or not self.rules or not all(map(_is_rule, self.rules)):
            raise refusal(self, "rules", "must be a tuple of (pattern or Match, Compressor)")
        for compressor in self._compressors:
            if loss_of_a_matrix(compressor).of_bucket:
                raise SettingsError(
                    f"PerParameter: {compressor!r} must be given whole buckets, and not some parameters."
                )

    @property
    def sends(self) -> Sends:
        """The widest of the compressors' `sends`."""
        return max(compressor.sends for compressor in self._compressors)

    def takes(self, gradient: Tensor) -> bool:
        """Return whether all of the compressors take the gradient."""
        return all(compressor.takes(gradient) for compressor in self._compressors)

    def check(self, named: Mapping[str, Tensor], world_size: int | None) -> None:
        """Raise `SettingsError` if a rule applies to no parameter, or a compressor rejects its parameters."""
        for number, (pattern, _) in enumerate(self.rules):
            matching = [name for name, parameter in named.items() if _match(pattern).matches(name, parameter)]
            taken = [name for name in matching if self._rule_of(name, named[name]) != number]
            if not matching:
                raise SettingsError(
                    f"PerParameter: {pattern!r} must match a parameter; there are {', '.join(list(named)[:8])}."
                )
            if len(taken) == len(matching):
                raise SettingsError(
                    f"PerParameter: all that {pattern!r} matches, such as {taken[0]!r}, is matched by a rule before it."
                )
        for compressor in self._compressors:
            mine = {name: parameter for name, parameter in named.items() if self._of(name, parameter) is compressor}
            compressor.check(mine, world_size)

    def state(self, place: Place) -> Declared:
        """Return the entries of the parameter's compressor."""
        return self._of(place.name, place.parameter).state(dataclasses.replace(place, bucket=None))

    def choose(self, states: Mapping[Tensor, ParameterState], step: int) -> Mapping[Tensor, int]:
        """Return each compressor's choices for its own parameters."""
        chosen: dict[Tensor, int] = {}
        for compressor in self._compressors:
            if not never_chooses(compressor):
                own = {p: state for p, state in states.items() if self._of(state.key, p) is compressor}
                chosen |= compressor.choose(own, step)
        return chosen

    def loss(self, name: str, parameter: Tensor) -> Loss | None:
        """Return the loss of the parameter's compressor."""
        return self._of(name, parameter).loss(name, parameter)

    def why_whole(self, place: Place) -> str | None:
        """Return the reason of the parameter's compressor."""
        return self._of(place.name, place.parameter).why_whole(place)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Run the compressors side by side, each on its own slots."""
        if bucket.memory.is_sparse or not bucket.slots:
            alone = bucket.slots[0] if bucket.slots else None
            compressor = self._of(alone.name, alone.parameter) if alone else self.otherwise
            return compressor.compress(bucket, context)
        return self._side_by_side(bucket, context)

    def scatter(self, bucket: BucketView, context: Context) -> Exchange:
        """Run the compressors side by side, each on its own slots."""
        return self._side_by_side(bucket, context)

    def _side_by_side(self, bucket: BucketView, context: Context) -> Exchange:
        parts = bucket.plan(self, lambda: self._parts(bucket))
        return side_by_side(
            [judged(part or bucket, begin_exchange(compressor, part or bucket, context)) for compressor, part in parts]
        )

    def _parts(self, bucket: BucketView) -> Sequence[tuple[Compressor, BucketView | None]]:
        """Return each compressor's part of a bucket; None for all, since a bucket's plans must not refer to it."""
        slots: dict[int, list[Slot]] = {}
        numbers = {id(compressor): number for number, compressor in enumerate(self._compressors)}
        for slot in bucket.slots:
            slots.setdefault(numbers[id(self._of(slot.name, slot.parameter))], []).append(slot)
        return [
            (self._compressors[number], None if len(own) == len(bucket.slots) else bucket.subset(own))
            for number, own in sorted(slots.items())
        ]

    @property
    def _compressors(self) -> list[Compressor]:
        return [*(compressor for _, compressor in self.rules), self.otherwise]

    def _of(self, name: str, parameter: Tensor) -> Compressor:
        """Return a parameter's compressor."""
        number = self._rule_of(name, parameter)
        return self.otherwise if number is None else self.rules[number][1]

    def _rule_of(self, name: str, parameter: Tensor) -> int | None:
        """Return the index of the first rule that matches, or None."""
        found = (number for number, (pattern, _) in enumerate(self.rules) if _match(pattern).matches(name, parameter))
        return next(found, None)


def _match(pattern: str | Match) -> Match:
    return Match(name=pattern) if isinstance(pattern, str) else pattern


def _is_rule(rule: object) -> bool:
    return (
        isinstance(rule, tuple)
        and len(rule) == 2
        and isinstance(rule[0], (str, Match))
        and isinstance(rule[1], Compressor)
    )
