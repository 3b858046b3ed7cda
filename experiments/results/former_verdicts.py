"""Verdicts on hooks: whether one pays, and whether its loss differs enough to matter, from runs paired by seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from .intervals import LEAST_SEEDS, Estimate
from .outcomes import Outcome, Setting
from .summary import total_seconds

_SURE = 1.96  # standard errors of a point of the curves of training losses, to either side of a single seed's


class Difference(Enum):
    """A difference of losses, ours - the baseline's, compared with the setting's margin."""

    LOWER = "lower by more than the margin"
    HIGHER = "higher by more than the margin"
    SAME = "within the margin"
    OPEN = "not settled"

    @property
    def matters(self) -> bool:
        """True if the difference is surely larger than the margin."""
        return self in {Difference.LOWER, Difference.HIGHER}

    @property
    def vote(self) -> int:
        """1 for the hook, -1 against it, 0 for neither."""
        return (self is Difference.LOWER) - (self is Difference.HIGHER)


@dataclass(frozen=True)
class Losses:
    """The differences of a hook's losses from the baseline's; None: not compared."""

    same_time: Difference | None  # training loss after the same time
    held_out_then: Difference | None  # held-out loss then
    equal_steps: Difference | None  # held-out loss after the steps asked for


class Verdict(Enum):
    """The verdict on a hook in one setting."""

    PAYS = "pays"
    COSTS = "does not pay"
    OPEN = "not settled"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Judgement:
    """The result of each comparison with the baseline: 1 for the hook, -1 against it, 0 neither, None not known."""

    target: int | None  # which of the two reached it sooner
    same_time: int | None  # whose training loss was lower after the same time
    held_out: int | None  # the same of the held-out loss
    ended_early: bool = False  # some run had neither the baseline's time nor the target when it ended
    diverged: bool = False

    @property
    def votes(self) -> set[int]:
        """The comparisons that found a difference."""
        return {vote for vote in (self.target, self.same_time, self.held_out) if vote}

    @property
    def verdict(self) -> Verdict:
        """The verdict of all comparisons: not settled if they disagree, or if the run ended too early to tell."""
        if self.diverged:
            return Verdict.DIVERGED
        decisive = {vote for vote in (self.target, self.same_time) if vote}
        too_short = self.ended_early and self.target not in decisive
        if len(self.votes) != 1 or not decisive or too_short:
            return Verdict.OPEN
        return Verdict.PAYS if decisive == {1} else Verdict.COSTS


def judgements(setting: Setting) -> Mapping[str, Judgement]:
    """Return a judgement of each hook but the baseline."""
    first = setting.baseline
    if setting.is_silent:
        others = (one for one in setting.outcomes if one is not first)
        return {one.hook: Judgement(None, None, None, diverged=bool(one.diverged)) for one in others}
    return (
        {} if first is None else {one.hook: _judge(one, first, setting) for one in setting.outcomes if one is not first}
    )


def losses_of(setting: Setting, hook: str) -> Losses:
    """Return how the losses of a hook other than the baseline differ from the baseline's."""
    versus, margin = setting.versus[hook], setting.margin
    noise = {seed: _SURE * moment.noise for seed, moment in versus.moments.items()}
    everywhere = versus.held_out_then.seeds == versus.seeds
    return Losses(
        same_time=weighed(versus.same_time, margin, noise),
        held_out_then=weighed(versus.held_out_then, margin) if everywhere else None,
        equal_steps=weighed(versus.loss, margin),
    )


_NONE: Mapping[int, float] = {}


def weighed(difference: Estimate, margin: float, noise: Mapping[int, float] = _NONE) -> Difference | None:
    """Compare a difference of losses with the margin; return None without seeds.

    It matters if all of its 95 % interval lies beyond the margin, and does not if all of it lies within. With fewer
    seeds than an interval needs, each of them must say so, give or take its noise.
    """
    if not difference.seeds:
        return None
    ranges = [difference.ends]
    if difference.interval is None:
        ranges = [
            (value - noise.get(seed, 0.0), value + noise.get(seed, 0.0)) for seed, value in difference.by_seed.items()
        ]
    if all(low > margin for low, _ in ranges):
        return Difference.HIGHER
    if all(high < -margin for _, high in ranges):
        return Difference.LOWER
    within = all(-margin <= low and high <= margin for low, high in ranges)
    return Difference.SAME if within else Difference.OPEN


def _judge(one: Outcome, first: Outcome, setting: Setting) -> Judgement:
    versus, losses = setting.versus[one.hook], losses_of(setting, one.hook)
    same_time, held_out = (None if each is None else each.vote for each in (losses.same_time, losses.held_out_then))
    return Judgement(
        target=_sooner(one, first, versus.to_target, same_time),
        same_time=same_time,
        held_out=held_out,
        ended_early=any(not moment.whole and seed not in one.reached for seed, moment in versus.moments.items()),
        diverged=bool(one.diverged),
    )


def _sooner(one: Outcome, first: Outcome, speed_up: Estimate, same_time: int | None) -> int | None:
    """Return 1 if the hook reached the target sooner, -1 if later, or not in the time that the baseline took.

    When a noisy mean first passes the target scatters over many steps. With too few seeds to
    tell how far, it counts only if the losses after the same time differ too.
    """
    ours, theirs = one.seconds_to_target.by_seed, first.seconds_to_target.by_seed
    said, shared = [], one.results.keys() & first.results.keys()
    for seed in shared:
        if seed in ours and seed in theirs:  # a target is reached at the end of a step
            step = max(one.step.by_seed[seed], first.step.by_seed[seed])
            ahead = theirs[seed] - ours[seed]
            said.append((ahead > step) - (ahead < -step))
        elif seed in theirs:  # it had at least as long, or ended before that
            said.append(-1 if total_seconds(one.results[seed].steps) >= theirs[seed] else 0)
        elif seed in ours:
            said.append(1 if total_seconds(first.results[seed].asked_steps) >= ours[seed] else 0)
    if len(said) == speed_up.seeds >= LEAST_SEEDS:
        return speed_up.sign
    found = None if not said else said[0] if len({*said}) == 1 else 0  # 0: the seeds differ
    return found if found is None or same_time or len(shared) >= LEAST_SEEDS else 0
