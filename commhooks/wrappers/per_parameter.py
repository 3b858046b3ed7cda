"""Some parameters to one compressor, and some to another."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence

from torch import Tensor

from commhooks.compressors.all_reduce import AllReduceMean
from commhooks.errors import SettingsError
from commhooks.language.bucket import BucketView, Slot
from commhooks.language.compressor import Compressor, Context, Exchange, judged, side_by_side
from commhooks.language.entries import Declared


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerParameter(Compressor):
    """Give each parameter to the compressor whose pattern matches its name, and the rest to `otherwise`.

    A step takes the rounds of the compressor that needs most, and not the sum of all.
    """

    rules: tuple[tuple[str, Compressor], ...]
    """Shell patterns such as "head.*", each with its compressor."""
    otherwise: Compressor = dataclasses.field(default_factory=AllReduceMean)
    first_match: bool = False
    """On: if several patterns match a name, the first one counts. Off: that raises an error."""

    def __post_init__(self) -> None:
        rules = self.rules
        if not isinstance(rules, tuple) or not rules or not all(_is_rule(rule) for rule in rules):
            raise SettingsError(f"PerParameter(rules={rules!r}): rules must be a tuple of (pattern, Compressor).")
        if not isinstance(self.otherwise, Compressor):
            raise SettingsError(f"PerParameter(otherwise={self.otherwise!r}): otherwise must be a Compressor.")
        for compressor in self._compressors:
            if compressor.needs_whole_buckets:
                raise SettingsError(
                    f"PerParameter: {compressor!r} must be given whole buckets, and not some parameters."
                )

    @property
    def fixes_wire(self) -> bool:
        """Whether any of the compressors does."""
        return any(compressor.fixes_wire for compressor in self._compressors)

    @property
    def only_sums(self) -> bool:
        """Whether all of the compressors ask for sums only."""
        return all(compressor.only_sums for compressor in self._compressors)

    def takes(self, gradient: Tensor) -> bool:
        """Take what all of the compressors take."""
        return all(compressor.takes(gradient) for compressor in self._compressors)

    def check_parameters(self, named: Mapping[str, Tensor]) -> None:
        """Raise `SettingsError` if a pattern matches nothing, or two match one name, or a compressor objects."""
        for pattern, _ in self.rules:
            if not fnmatch.filter(named, pattern):
                raise SettingsError(
                    f"PerParameter: {pattern!r} must match a parameter's name; there are {', '.join(list(named)[:8])}."
                )
        for name in named:
            matching = [pattern for pattern, _ in self.rules if fnmatch.fnmatchcase(name, pattern)]
            if len(matching) > 1 and not self.first_match:
                raise SettingsError(
                    f"PerParameter: {name!r} is matched by {' and '.join(map(repr, matching))}; make one narrower, "
                    "or pass first_match=True."
                )
        for compressor in self._compressors:
            mine = {name: parameter for name, parameter in named.items() if self._of(name) is compressor}
            compressor.check_parameters(mine)

    def state(self, name: str, parameter: Tensor, world_size: int) -> Declared:
        """Return those of the parameter's compressor."""
        return self._of(name).state(name, parameter, world_size)

    def remembers(self, step: int) -> bool:
        """Return whether any of the compressors does."""
        return any(compressor.remembers(step) for compressor in self._compressors)

    def loses(self, name: str, parameter: Tensor) -> bool:
        """Return whether the parameter's compressor does."""
        return self._of(name).loses(name, parameter)

    def relative_error(self, elements: int) -> float:
        """Return the largest of the compressors'."""
        return max(compressor.relative_error(elements) for compressor in self._compressors)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        """Run the compressors side by side, each on its own slots."""
        if bucket.memory.is_sparse or not bucket.slots:
            return (self._of(bucket.slots[0].name) if bucket.slots else self.otherwise).compress(bucket, context)
        parts = bucket.plan(self, lambda: self._parts(bucket))
        return side_by_side([judged(part, compressor.compress(part, context)) for compressor, part in parts])

    def _parts(self, bucket: BucketView) -> Sequence[tuple[Compressor, BucketView]]:
        slots: dict[int, list[Slot]] = {}
        numbers = {id(compressor): number for number, compressor in enumerate(self._compressors)}
        for slot in bucket.slots:
            slots.setdefault(numbers[id(self._of(slot.name))], []).append(slot)
        return [
            (self._compressors[number], bucket if len(own) == len(bucket.slots) else bucket.subset(own))
            for number, own in sorted(slots.items())
        ]

    @property
    def _compressors(self) -> list[Compressor]:
        return [*(compressor for _, compressor in self.rules), self.otherwise]

    def _of(self, name: str) -> Compressor:
        """Return a parameter's compressor."""
        return next((c for pattern, c in self.rules if fnmatch.fnmatchcase(name, pattern)), self.otherwise)


def _is_rule(rule: object) -> bool:
    return isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str) and isinstance(rule[1], Compressor)
