"""The sizes that a probe may send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commhooks.experiments.planning.predicting import payloads_of
from commhooks.experiments.planning.probes import MEASURED, REACH
from commhooks.experiments.planning.profiles import Profile

SIZES = (256, *(4**power for power in range(6, 13)))
"""Bytes each rank contributes: 256 B, 4 KiB, and four times as much each, to 16 MiB."""
LEAST_SIZES = 2
LEAST_SECONDS, MOST_SECONDS = 1.0, 120.0
GOOD_TURNS = 6  # higher: steadier medians, but smaller messages on a slow link
LOOKS = 2  # at each size before the turns: one in which memory is allocated, and one that is timed
REPEATS = 1.25  # by which a turn is longer because small messages are sent several times in it
ATTEMPTS = 2  # a measurement that contradicts itself is repeated
_MOST_BYTES = 2**28  # of an answer: what many ranks gather


class SizesToTry(NamedTuple):
    """The sizes of one kind of collective to try."""

    sizes: tuple[int, ...]
    """Ascending, in bytes each rank contributes."""
    needed: int = 0
    """The smallest size from which the profile's largest payload can be predicted.

    Sizes up to this one are measured even if that takes the whole time limit.
    """


def sizes_of(profile: Profile | None, ranks: int) -> dict[str, SizesToTry]:
    """Return the sizes to try, by kind.

    For a profile, sizes end with a fourth of the largest payload that its hooks send, and with that payload itself; the
    kinds are sums and those that the hooks send. Otherwise every kind has all `SIZES`.
    """
    if profile is None:
        return {kind: _sizes_to_try(kind, SIZES, ranks) for kind in MEASURED}
    largest = {"all-reduce": 0, **payloads_of(profile, *profile.hooks.values())}
    found = {}
    for kind in (kind for kind in MEASURED if kind in largest):
        needed = -(-largest[kind] // REACH)
        below = tuple(size for size in SIZES if size < needed)
        found[kind] = _sizes_to_try(kind, (*below, needed, largest[kind]), ranks, needed)
    return found


def _sizes_to_try(kind: str, sizes: Sequence[int], ranks: int, needed: int = 0) -> SizesToTry:
    least = SIZES[:LEAST_SIZES]
    answers = ranks if kind == "all-gather" else 1
    more = (size for size in sizes if size > least[-1] and size * answers <= _MOST_BYTES)
    return SizesToTry((*least, *more), needed)
