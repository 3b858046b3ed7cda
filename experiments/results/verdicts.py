"""Whether a hook pays: what its runs say beside the baseline's, after the same time first."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from .intervals import LEAST_SEEDS, Estimate
from .outcomes import Outcome, Setting
from .summary import total_seconds

# With fewer seeds than an interval needs, what counts as a difference within each:
_SURE = 1.96  # standard errors of a point of the curves of training losses
_SHOWN = 0.0005  # half of the last digit that is shown of a loss


class Verdict(Enum):
    """What can be said of a hook in one setting."""

    PAYS = "pays"
    COSTS = "does not pay"
    OPEN = "not settled"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Judgement:
    """What each comparison with the baseline says: 1 for the hook, -1 against it, 0 no difference, None not known."""

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
        """What they say together: neither yes nor no if they disagree, or if the run ended too early to tell."""
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


def _judge(one: Outcome, first: Outcome, setting: Setting) -> Judgement:
    versus = setting.versus[one.hook]
    noise = {seed: _SURE * moment.noise for seed, moment in versus.moments.items()}
    everywhere = versus.held_out_then.seeds == versus.seeds
    same_time = _lower(versus.same_time, noise)
    return Judgement(
        target=_sooner(one, first, versus.to_target, same_time),
        same_time=same_time,
        held_out=_lower(versus.held_out_then, dict.fromkeys(noise, 0.0)) if everywhere else None,
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
            said.append(_side(theirs[seed] - ours[seed], step))
        elif seed in theirs:  # it had at least as long, or ended before that
            said.append(-1 if total_seconds(one.results[seed].steps) >= theirs[seed] else 0)
        elif seed in ours:
            said.append(1 if total_seconds(first.results[seed].asked_steps) >= ours[seed] else 0)
    if len(said) == speed_up.seeds >= LEAST_SEEDS:
        return speed_up.sign
    found = _unanimous(said)
    return found if found is None or same_time or len(shared) >= LEAST_SEEDS else 0


def _lower(difference: Estimate, unsure: Mapping[int, float]) -> int | None:
    """Return 1 if the difference of two losses is below zero, beyond what differs between seeds or is noise in each."""
    if difference.seeds >= LEAST_SEEDS:
        sign = difference.sign
        return None if sign is None else -sign
    return _unanimous([-_side(value, max(unsure[seed], _SHOWN)) for seed, value in difference.by_seed.items()])


def _side(value: float, unsure: float) -> int:
    """Return 1 or -1 for a value above or below zero by more than this, otherwise 0."""
    return (value > unsure) - (value < -unsure)


def _unanimous(said: Collection[int]) -> int | None:
    """Return what all seeds say; 0 if they differ, None without any."""
    return None if not said else next(iter(said)) if len({*said}) == 1 else 0
