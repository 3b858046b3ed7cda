"""The verdict on a hook: whether it pays, from its runs and the baseline's, paired by seed and by step.

Dominance decides first: a hook whose steps are faster and whose loss at equal steps is no worse pays, one that is
neither faster nor better does not. Only a hook that is faster and worse is judged by the loss after equal time. What
the runs do not settle stays open, with the reason and how much longer they would have to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

WARM_UP = 5  # the first steps, whose times do not count
LEAST_SEEDS = 4  # from so many seeds on their scatter makes an interval
SMALLEST_MARGIN = 0.0005  # half of the last digit that is shown of a loss
_CONFIDENCE = 0.95
_FEW_TURNS = 6  # a sign test of fewer never reaches that confidence
_BATCHES = 6  # of neighbouring steps, whose means are nearly independent
_MOST_ALIKE = 0.9
_SPARE = 1.2  # times what would settle a verdict if the estimate stayed where it is

Floats = npt.NDArray[np.float64]


class Verdict(Enum):
    """The verdict on a hook in one setting."""

    PAYS = "pays"
    COSTS = "does not pay"
    OPEN = "not settled"
    DIVERGED = "diverged"


@dataclass(frozen=True, kw_only=True)
class Margins:
    """What matters to the user."""

    matters: float = 0.01
    """A difference of losses matters above this fraction of what the baseline's loss falls: about what another seed
    changes."""
    saves: float = 0.05
    """A saving matters above this fraction of a step's time."""

    def __post_init__(self) -> None:
        """Check both.

        Raises:
            ValueError: One is not in (0, 1).

        """
        for name, value in vars(self).items():
            if not 0 < value < 1:
                raise ValueError(f"{name} must be a fraction between 0 and 1 (got {value!r})")


USUAL = Margins()


@dataclass(frozen=True)
class Run:
    """One run: the training loss and the seconds of every step, also of those beyond the steps asked for."""

    losses: Sequence[float]
    seconds: Sequence[float]
    held_out: Mapping[int, float] = field(default_factory=dict)
    """Loss on held-out data, by the number of steps before it; empty: the task has none."""

    @property
    def is_finite(self) -> bool:
        """True if no loss is infinite or NaN."""
        return all(map(math.isfinite, (*self.losses, *self.held_out.values())))


@dataclass(frozen=True)
class Range:
    """An estimate with its 95 % interval."""

    mean: float
    low: float
    high: float

    def longer(self, border: float) -> float:
        """Return how many times the data would put this border outside the interval."""
        return ((self.high - self.low) / 2 / max(abs(self.mean - border), 1e-12)) ** 2


UNKNOWN = Range(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Judged:
    """A verdict with its reason and the three comparisons; losses are ours - the baseline's."""

    verdict: Verdict
    why: str
    speed_up: Range  # the baseline's step over ours
    equal_steps: Range  # training loss over the last third of the steps asked for
    equal_time: Range  # training loss over the last three quarters of the time that both have had
    margin: float  # a difference of losses above it matters
    lacks: str = ""  # what would settle an open verdict: "steps", "seeds" or "neither"
    longer: float = 1.0  # times the steps, or the seeds, that would probably settle it


def judge(
    baseline: Mapping[int, Run], hook: Mapping[int, Run], *, steps: int, every: int = 1, margins: Margins = USUAL
) -> Judged:
    """Return the verdict on a hook. Step t of a seed has the same data in both runs, and their steps took turns.

    Args:
        baseline: The baseline's runs by seed.
        hook: The hook's runs by seed; seeds that the baseline lacks do not count.
        steps: The steps asked for; the hook's runs may have more.
        every: The steps of one round of the hook, if its steps alternate as DiLoCo's do: rounds are compared then.
        margins: What matters.

    Raises:
        ValueError: No seed is in both.

    """
    if not hook.keys() & baseline.keys():
        raise ValueError("a verdict needs a seed with which both the hook and the baseline were run")
    if not all(one.is_finite for one in hook.values()):
        return Judged(Verdict.DIVERGED, "its loss is not finite", UNKNOWN, UNKNOWN, UNKNOWN, math.nan)
    both = sorted(seed for seed in hook.keys() & baseline.keys() if baseline[seed].is_finite)
    pairs = [(hook[seed], baseline[seed]) for seed in both]
    if not pairs:
        why = "the baseline's loss is not finite, so that it says nothing about others"
        return Judged(Verdict.OPEN, why, UNKNOWN, UNKNOWN, UNKNOWN, math.nan, lacks="neither")
    if steps < 2:
        why = "one step compares nothing"
        return Judged(Verdict.OPEN, why, UNKNOWN, UNKNOWN, UNKNOWN, SMALLEST_MARGIN, lacks="neither")
    fall = float(np.mean([theirs.losses[0] - np.mean(theirs.losses[:steps][-10:]) for _, theirs in pairs]))
    margin = max(margins.matters * fall, SMALLEST_MARGIN)
    speed = _speed_up(pairs, steps, every)  # a property of hook and link: the turns of all seeds count
    found = _decided(pairs, speed, steps, every, margin, margins)
    each = [_decided([pair], speed, steps, every, margin, margins).verdict for pair in pairs]
    settled = {*each} - {Verdict.OPEN}
    if len(settled) == 1 and 2 * each.count(Verdict.OPEN) <= len(each):
        agreed = settled.pop()
        return found if found.verdict is agreed else replace(found, verdict=agreed, lacks="", longer=1.0)
    if len(pairs) >= LEAST_SEEDS or found.verdict is Verdict.OPEN:
        return found
    why = f"its seeds disagree: {found.why}"
    return replace(found, verdict=Verdict.OPEN, why=why, lacks="seeds", longer=LEAST_SEEDS / len(pairs))


def best(judged: Mapping[str, Judged]) -> str | None:
    """Return the hook that pays and has the lowest loss after equal time; None if none pays."""
    paying = [name for name, one in judged.items() if one.verdict is Verdict.PAYS]
    return min(paying, key=lambda name: judged[name].equal_time.mean, default=None)


Pairs = Sequence[tuple[Run, Run]]  # ours and the baseline's, by seed


def _decided(pairs: Pairs, speed: Range, steps: int, every: int, margin: float, margins: Margins) -> Judged:
    loss, then = _equal_steps(pairs, steps, every), _equal_time(pairs, steps, speed)
    least = 1 / (1 - margins.saves)
    # Another seed differs by more than a run's own scatter shows, so few seeds decide only by what matters.
    border = margin if len(pairs) < LEAST_SEEDS else 0.0
    at_equal_steps = f"at equal steps its loss {_differs(loss.mean)}"
    faster = f"its steps are {speed.mean:.2f} times as fast"
    found = Judged(Verdict.OPEN, "", speed, loss, then, margin)
    if speed.low > least and loss.high <= margin:
        return _held_out(found, pairs, steps, f"{faster}, and {at_equal_steps}: no worse")
    if speed.high <= least and loss.low >= -margin:
        why = f"its steps are no faster ({speed.mean:.2f} times), and {at_equal_steps}: no better"
        return replace(found, verdict=Verdict.COSTS, why=why)
    if loss.high <= margin and loss.low >= -margin:
        why = f"whether its steps are faster is not sure ({speed.low:.2f} to {speed.high:.2f} times), {at_equal_steps}"
        return replace(found, why=why, lacks="steps", longer=max(_SPARE * speed.longer(least), _SPARE))
    costs = "costs" if loss.mean > 0 else "gains"
    why = f"after equal time its loss {_differs(then.mean)}; it {costs} {abs(loss.mean):.3f} at equal steps"
    if then.high < -border:
        return _held_out(found, pairs, steps, why)
    if then.low > border:
        return replace(found, verdict=Verdict.COSTS, why=why)
    by_steps = then.longer(border if then.mean > 0 else -border)
    if len(pairs) < LEAST_SEEDS and by_steps > LEAST_SEEDS / len(pairs):
        return replace(found, why=why, lacks="seeds", longer=LEAST_SEEDS / len(pairs))
    return replace(found, why=why, lacks="steps", longer=max(_SPARE * by_steps, _SPARE))


def _held_out(found: Judged, pairs: Pairs, steps: int, why: str) -> Judged:
    """Return that a hook pays, unless its held-out loss is surely higher by what matters.

    It is compared where training losses are: after the steps asked for if those decide, otherwise after equal time.
    """
    equal = found.equal_steps.high <= found.margin
    then = [one for pair in pairs if (one := _held_out_difference(*pair, steps, equal=equal)) is not None]
    if not then:
        return replace(found, verdict=Verdict.PAYS, why=why)
    low = min(then) - found.margin  # one evaluation scatters by about the margin
    if len(then) >= LEAST_SEEDS:
        low = _of_seeds([(one, 0.0, len(then) - 1) for one in then]).low
    if low <= found.margin:
        return replace(found, verdict=Verdict.PAYS, why=why)
    against = f"; but its held-out loss {_differs(float(np.mean(then)))} {'then' if not equal else 'there'}"
    return replace(found, why=why + against, lacks="neither")


def _held_out_difference(ours: Run, theirs: Run, steps: int, *, equal: bool) -> float | None:
    """Return the difference of held-out losses after the steps asked for, or after the time that both have had."""
    if equal:
        known = steps in ours.held_out and steps in theirs.held_out
        return ours.held_out[steps] - theirs.held_out[steps] if known else None
    if not ours.held_out or not theirs.held_out:
        return None
    common = min(sum(ours.seconds), sum(theirs.seconds[:steps]))
    return _held_out_after(common, ours) - _held_out_after(common, theirs)


def _held_out_after(seconds: float, run: Run) -> float:
    """Return the held-out loss after this time, on a line between evaluations; before the first, that one's."""
    places = sorted(run.held_out)
    ends = np.cumsum(run.seconds)[np.subtract(places, 1)]
    return float(np.interp(seconds, ends, [run.held_out[place] for place in places]))


def _speed_up(pairs: Pairs, steps: int, every: int) -> Range:
    """Return the median of the baseline's time over ours, turn by turn, with the interval of the sign test.

    Turns that resemble their neighbours count for fewer. A few rounds of DiLoCo have a mean with Student's t instead.
    """
    first = 0 if every > 1 else min(WARM_UP, steps // 4)
    each = [np.log(_rounds(b.seconds[first:steps], every) / _rounds(h.seconds[first:steps], every)) for h, b in pairs]
    ratios = np.sort(np.concatenate(each))
    if len(ratios) < _FEW_TURNS:
        if len(ratios) < 2:
            return Range(math.exp(ratios[0]), 0.0, math.inf)
        mean, half = float(np.mean(ratios)), _half(float(np.std(ratios, ddof=1)) / math.sqrt(len(ratios)), len(ratios))
        return Range(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
    apart = [one - np.mean(one) for one in each if len(one) > 1]
    alike = np.mean([np.mean(one[1:] * one[:-1]) / max(np.var(one), 1e-12) for one in apart]) if apart else 0.0
    alike = min(max(float(alike), 0.0), _MOST_ALIKE)
    spread = 1.96 * math.sqrt(len(ratios) * (1 + alike) / (1 - alike))
    place = max(0, int((len(ratios) - spread) / 2))
    return Range(*(math.exp(one) for one in (np.median(ratios), ratios[place], ratios[-1 - place])))


def _rounds(seconds: Sequence[float], every: int) -> Floats:
    """Return the mean seconds of a step in each whole round."""
    whole = len(seconds) // every * every or len(seconds)
    found: Floats = np.asarray(seconds[:whole], dtype=np.float64).reshape(-1, min(every, whole)).mean(axis=1)
    return found


def _equal_steps(pairs: Pairs, steps: int, every: int) -> Range:
    """Return the mean difference over the last third, in whole rounds; its error is that of a few batches of steps."""
    window = min(math.ceil(max(steps // 3, _BATCHES) / every) * every, steps)
    found = []
    for ours, theirs in pairs:
        last = np.subtract(ours.losses[:steps], theirs.losses[:steps])[-window:]
        batches = [float(np.mean(one)) for one in np.array_split(last, min(_BATCHES, len(last)))]
        spread = float(np.std(batches, ddof=1)) if len(batches) > 1 else math.inf
        found.append((float(np.mean(last)), spread / math.sqrt(len(batches)), len(batches) - 1))
    return _of_seeds(found)


def _equal_time(pairs: Pairs, steps: int, speed: Range) -> Range:
    """Return the difference of losses after equal time; its error holds the losses' and the speed's."""
    mean, *ends = (_after_equal_time(pairs, steps, ratio) for ratio in (speed.mean, speed.low, speed.high))
    noise = mean.high - mean.mean
    down, up = (math.hypot(noise, mean.mean - end(one.mean for one in (mean, *ends))) for end in (min, max))
    return Range(mean.mean, mean.mean - down, mean.mean + up)


def _after_equal_time(pairs: Pairs, steps: int, ratio: float) -> Range:
    """Return the difference of mean losses over the last three quarters of the common time, if steps are typical.

    The unit of time is the baseline's step. Ours take 1/ratio of it, and their first ones as much longer as they did.
    """
    found = []
    ratio = min(max(ratio, 1e-6), 1e6)  # an unknown speed has the interval from nothing to infinity
    for ours, theirs in pairs:
        first = min(WARM_UP, steps // 4)
        later = (sum(ours.seconds[:first]) - sum(theirs.seconds[:first])) / np.median(theirs.seconds[first:steps])
        mine = first + later + np.arange(1 - first, len(ours.losses) - first + 1) / ratio  # when each step ended
        its = np.arange(1.0, steps + 1)
        common = min(mine[-1], steps)
        late = [(one > common / 4) & (one <= common + 1e-9) for one in (mine, its)]
        length = max(map(len, late))
        counts, counted = (np.pad(one, (0, length - len(one))) for one in late)
        shares = [
            np.resize(run.losses, length) * one / max(one.sum(), 1) for run, one in ((ours, counts), (theirs, counted))
        ]
        apart = shares[0] - shares[1]  # at a step that both count, what its batch adds to both largely cancels
        # Half the mean squared difference of neighbours is the variance, where both are counted alike.
        alike = (counts[1:] == counts[:-1]) & (counted[1:] == counted[:-1])
        error = math.sqrt(float(np.sum(np.diff(apart)[alike] ** 2)) / 2)
        found.append((float(apart.sum()), error, max(int(min(counts.sum(), counted.sum())) - 1, 0)))
    return _of_seeds(found)


def _of_seeds(found: Iterable[tuple[float, float, int]]) -> Range:
    """Return the mean over seeds; its error is the runs' own or, if larger, the scatter of the seeds.

    Args:
        found: For each seed the value, its standard error and that error's degrees of freedom.

    """
    means, errors, freedoms = zip(*found, strict=True)
    mean, count = float(np.mean(means)), len(means)
    half = _half(math.sqrt(sum(one**2 for one in errors)) / count, sum(freedoms) + 1)
    if count >= LEAST_SEEDS:
        half = max(half, _half(float(np.std(means, ddof=1)) / math.sqrt(count), count))
    return Range(mean, mean - half, mean + half)


def _half(error: float, count: int) -> float:
    """Return half of the interval of a mean of `count` values; infinite for one."""
    return float(stdtrit(count - 1, (1 + _CONFIDENCE) / 2)) * error if count > 1 else math.inf


def _differs(difference: float) -> str:
    if abs(difference) < SMALLEST_MARGIN:
        return "is the same"
    return f"is {'higher' if difference > 0 else 'lower'} by {abs(difference):.3f}"
