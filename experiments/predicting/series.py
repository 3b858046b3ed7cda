"""A model's profile for any number of ranks, interpolated between measured numbers of ranks: `Series`."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from .errors import ProfileError
from .payloads import is_padded
from .predicting import NoLink, Unlinked, step_of
from .profiles import BucketProfile, HookProfile, Profile, RoundProfile, Sends
from .step_time import step_time

Payloads = tuple[tuple[Sends, ...], ...]
"""The payloads of each bucket in each round."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """A hook's payloads for a number of ranks with which it was not timed."""

    hook: str
    """Its label in the profiles."""
    ranks: int
    payloads: Payloads


@dataclasses.dataclass(frozen=True)
class Series:
    """Profiles of one model, each measured as one of another number of ranks."""

    profiles: tuple[Profile, ...]
    """The profiles by ascending number of ranks, with the same hooks, buckets and rounds."""
    counted: tuple[Counted, ...] = ()

    def __post_init__(self) -> None:
        ranks = [profile.ranks for profile in self.profiles]
        if not ranks or ranks != sorted(set(ranks)):
            raise ProfileError(f"Series: profiles must be of one number of ranks or more, ascending (got {ranks}).")
        for label in self.profiles[0].hooks:
            rounds = {tuple(len(bucket.rounds) for bucket in one.hooks[label].buckets) for one in self.profiles}
            if len(rounds) > 1:
                raise ProfileError(f"hook {label!r} takes other rounds with more ranks, which the model does not know.")

    @property
    def most_ranks(self) -> int:
        """The largest number of ranks with which compression was timed."""
        return self.profiles[-1].ranks

    @property
    def calmest(self) -> Profile:
        """The profile whose steps without communication were the shortest: other load can only slow them down."""
        return min(self.profiles, key=lambda profile: profile.noop.seconds.median)

    def at(self, ranks: int) -> Profile:
        """Return the profile for this number of ranks.

        Compression is interpolated between timed numbers of ranks. Beyond them, the work after a collective grows
        linearly with the bytes of its answer, as adding up gathered tensors does; it is constant if the answer's size
        is. Compute is taken from the calmest profile. Whatever else a hook adds to a step is the median over all
        profiles and at least zero: it does not depend on the number of ranks, and other load never makes a step
        shorter.
        """
        profile = dataclasses.replace(self.calmest, ranks=ranks)
        return dataclasses.replace(profile, hooks={label: self._hook(label, profile) for label in profile.hooks})

    def sends(self, hook: str, ranks: int) -> Payloads:
        """Return each bucket's payloads in each round under a hook.

        For other numbers of ranks than the counted ones, payloads follow the power law through the two nearest of
        these. If a bucket starts different collectives for these two (its codes do not pay for many ranks), it counts
        as for the higher one.
        """
        known = self._known(hook)
        if ranks in known:
            return known[ranks]
        numbers = sorted(known)
        if len(numbers) == 1:
            return known[numbers[0]]
        place = min(max(1, bisect.bisect(numbers, ranks)), len(numbers) - 1)
        low, high = numbers[place - 1], numbers[place]
        return tuple(
            _rounds_between(low, at_low, high, at_high, ranks)
            for at_low, at_high in zip(known[low], known[high], strict=True)
        )

    def is_counted(self, hook: str, ranks: int) -> bool:
        """Return whether the payloads of this many ranks were counted, or do not depend on their number."""
        known = self._known(hook)
        return ranks in known or (len(known) > 1 and is_constant(list(known.values())))

    def _known(self, hook: str) -> Mapping[int, Payloads]:
        known = {
            profile.ranks: tuple(tuple(one.sends for one in bucket.rounds) for bucket in profile.hooks[hook].buckets)
            for profile in self.profiles
        }
        return known | {one.ranks: one.payloads for one in self.counted if one.hook == hook}

    def _hook(self, label: str, profile: Profile) -> HookProfile:
        """Return a hook as one of a profile's ranks."""
        ranks, timed = profile.ranks, {one.ranks: one.hooks[label] for one in self.profiles}
        first = profile.hooks[label]
        buckets = []
        for number, (bucket, sends) in enumerate(zip(first.buckets, self.sends(label, ranks), strict=True)):
            seconds = [
                _seconds(
                    {one: _place(hook.buckets[number], place) for one, hook in timed.items()},
                    ranks,
                    sends[place - 1] if place else (),
                )
                for place in range(len(sends) + 1)
            ]
            rounds = tuple(map(RoundProfile, seconds, sends))
            buckets.append(dataclasses.replace(bucket, rounds=rounds, after=seconds[-1]))
        unknown = float(np.median([Unlinked.of(one, one.hooks[label]).unknown for one in self.profiles]))
        known = step_time(step_of(profile, first, buckets), NoLink(), ranks).seconds
        step = first.step.lasting(known + max(0.0, unknown))
        return dataclasses.replace(first, buckets=tuple(buckets), step=step)


def is_constant(payloads: Sequence[Payloads]) -> bool:
    """Return whether what was counted for several numbers of ranks is the same for all."""
    return all(one == payloads[0] and not any(map(is_padded, one)) for one in payloads)


def answer_bytes(sends: Sends, ranks: int) -> int:
    """Return the bytes that a rank receives as answers: of a gather, the payloads of all ranks."""
    return sum(payload * (ranks if kind == "all-gather" else 1) for kind, payload in sends)


def _place(bucket: BucketProfile, place: int) -> tuple[float, Sends]:
    """Return the compression before a round (or after the last one), and the collectives that precede it."""
    seconds = (*(one.seconds for one in bucket.rounds), bucket.after)[place]
    return seconds, bucket.rounds[place - 1].sends if place else ()


def _seconds(timed: Mapping[int, tuple[float, Sends]], ranks: int, asked: Sends) -> float:
    """Return compression that follows the collectives `asked`, given what was timed with some numbers of ranks."""
    numbers, seconds = list(timed), [own for own, _ in timed.values()]
    if ranks <= numbers[-1]:
        return float(np.interp(ranks, numbers, seconds))
    answers = [answer_bytes(sends, number) for number, (_, sends) in timed.items()]
    if max(answers) < 2 * min(answers) or not asked:  # too alike to tell growth from noise
        return float(np.median(seconds))
    slope = max(0.0, float(np.polyfit(answers, seconds, 1)[0]))
    return seconds[-1] + slope * max(0.0, answer_bytes(asked, ranks) - answers[-1])


def _rounds_between(
    low: int, at_low: Sequence[Sends], high: int, at_high: Sequence[Sends], ranks: int
) -> tuple[Sends, ...]:
    """Return a bucket's payloads for `ranks`, given those for two other numbers of ranks."""
    if [[kind for kind, _ in sends] for sends in at_low] != [[kind for kind, _ in sends] for sends in at_high]:
        return tuple(at_high)
    return tuple(
        tuple(
            (kind, _between(low, own, high, other, ranks)) for (kind, own), (_, other) in zip(mine, others, strict=True)
        )
        for mine, others in zip(at_low, at_high, strict=True)
    )


def _between(low: int, at_low: int, high: int, at_high: int, ranks: int) -> int:
    if at_low == at_high or not at_low or not at_high:
        return max(at_low, at_high)
    power = math.log(at_high / at_low) / math.log(high / low)
    return round(float(at_high * (ranks / high) ** power))
