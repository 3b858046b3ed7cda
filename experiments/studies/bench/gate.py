"""The regression gate: ratios measured now against those in the repository. Absolute times are never compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from commhooks.experiments.results.summary import Spread
from experiments.studies.bench.results import ROUNDED_BY, Measured, Results
from experiments.studies.bench.rows import Row

WORSE, BETTER, SAME, NEW, GONE = "worse", "better", "same", "new", "gone"


@dataclass(frozen=True)
class Change:
    """The change of one row."""

    section: str
    key: str
    kind: str
    before: Spread | None
    now: Spread | None

    @property
    def text(self) -> str:
        """The change in a line."""
        spreads = " -> ".join(
            f"{one.median:.3f} ({one.low:.3f} to {one.high:.3f})" if one else "nothing"
            for one in (self.before, self.now)
        )
        return f"{self.kind}: {self.section}: {self.key}: {spreads}"


def changes(stored: Results, found: Results) -> list[Change]:
    """Return the changes of all rows in the sections that were measured again."""
    return [change for name, section in found.items() for change in _changes_of(name, stored.get(name), section)]


def _changes_of(name: str, stored: Measured | None, found: Measured) -> Iterable[Change]:
    before = {row.key: row for row in stored.rows} if stored else {}
    now = {row.key: row for row in found.rows}
    for key in before | now:
        old, new = before.get(key), now.get(key)
        yield Change(name, key, _kind_of(old, new), old.spread if old else None, new.spread if new else None)


def _kind_of(old: Row | None, new: Row | None) -> str:
    if old is None or new is None:
        return NEW if new else GONE
    beyond = abs(new.spread.median - old.spread.median) > _width(old.spread) + _width(new.spread) + ROUNDED_BY
    if not beyond:
        return SAME
    return WORSE if new.spread.median > old.spread.median else BETTER


def _width(spread: Spread) -> float:
    """Return how far apart the quartiles are."""
    return spread.high - spread.low


def other_places(stored: Results, found: Results) -> list[str]:
    """Return a sentence for each section that was measured on another machine, or with other versions, than before."""
    sentences = []
    for name, section in found.items():
        before = stored.get(name, section)
        facts: list[Mapping[str, object]] = [before.place, section.place]
        said = "on {} before, and on {} now"
        if before.place == section.place:
            facts, said = [before.versions, section.versions], "with {} before, {} now"
        if facts[0] != facts[1]:
            words = (", ".join(f"{key} {value}" for key, value in one.items()) for one in facts)
            sentences.append(f"{name}: measured {said.format(*words)}")
    return sentences
