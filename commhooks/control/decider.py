"""The choice among candidates as the link changes, made from what the ranks measure between two steps.

The choice is a function of numbers that are the same on every rank, and of what was chosen before: no clock, no process
group, nothing random. `Adaptive` measures the numbers, exchanges them, and acts.

Of each candidate one step is kept, the last that was measured, with the link at that time. If it took T seconds on a
link where its collectives need N seconds (`Link.seconds`), then on a link where they need N' it should take

    T + max(0, N' - H) - max(0, N - H)

with H, the seconds of communication that the backward pass hides (the longest waiting in any candidate's step that was
not exposed), and no less than the step took without its exposed waiting.
"""

from __future__ import annotations

import dataclasses

from commhooks.control.link import Link
from commhooks.errors import SettingsError
from commhooks.units import seconds_in_words

_VISIT = 3  # steps with a compressor before it is judged; the first is not counted
_RECENT = 3  # steps whose shortest is the candidate's sample: a single late step changes nothing
_CHANGE = 0.2  # of a step: a change of waiting on which the link is probed
_SAME, _SHORT = 1.25, 0.02  # a link is the same if its seconds differ by less than this factor, or this part of a step
_TIE = 0.4  # of the margin: among candidates that differ by less, the first is used
_URGENT = 1.5  # a step that takes this many times as long as another candidate's moves at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveRule:
    """The rule by which the controller looks at the link and moves to another compressor.

    Raises `SettingsError` for a value that cannot work.
    """

    margin: float = 0.05
    """The part of a step that a move must be predicted to save, in (0, 1). Higher: fewer moves."""
    look: int = 8
    """Steps between two probes of a link on which waiting does not change, at least 1. Lower: a link that has become
    faster is used sooner."""

    def __post_init__(self) -> None:
        if not 0 < self.margin < 1:
            raise SettingsError(f"AdaptiveRule(margin={self.margin!r}): margin must be in (0, 1).")
        if type(self.look) is not int or self.look < 1:
            raise SettingsError(f"AdaptiveRule(look={self.look!r}): look must be a whole number of at least 1.")


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """A step as all ranks see it: in seconds, and what its collectives send."""

    seconds: float
    """Seconds of the whole step, on the slowest rank."""
    waiting: float
    """Seconds of waiting for collectives, on the rank that waited least: the last rank to arrive waits for the link
    alone."""
    exposed: float
    """Seconds of waiting that the backward pass did not hide, the largest over ranks."""
    data: float
    """Bytes sent, by the rank that sends most."""
    hops: float
    """Messages that wait for one another."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A measured step, and the link at that time."""

    step: StepTimes
    link: Link

    def seconds_on(self, link: Link, hidden: float) -> float:
        """Predict the step's seconds on another link; see the formula above."""
        step = self.step
        before, now = (max(0.0, each.seconds(step.data, step.hops) - hidden) for each in (self.link, link))
        return max(step.seconds - step.exposed, step.seconds + now - before)

    def slower_by(self, seconds: float) -> Sample:
        """Return the sample of a step in which everything but the link takes this many seconds longer."""
        return Sample(dataclasses.replace(self.step, seconds=max(0.0, self.step.seconds + seconds)), self.link)


@dataclasses.dataclass
class Decider:
    """Choices among candidates, the same on every rank; its fields are all that a choice depends on."""

    rule: AdaptiveRule
    candidate: int
    """The candidate in use, from 0."""
    samples: list[Sample | None]
    """Each candidate's last measured step; None before its first."""
    link: Link | None = None
    """The link as it was last probed."""
    steps: int = 0
    """Steps since the candidate took over; from its first probe on, `_VISIT` and the steps since the last probe."""
    recent: list[StepTimes] = dataclasses.field(default_factory=list)
    """The last steps with this candidate and, as far as is known, on this link."""
    favourite: int | None = None
    """The candidate that the last probe preferred to the one in use."""

    def __post_init__(self) -> None:
        if max(self.candidate, self.favourite or 0) >= len(self.samples):
            raise SettingsError(
                f"candidate {self.candidate} and favourite {self.favourite} must be below {len(self.samples)}."
            )

    def take(self, step: StepTimes) -> bool:
        """Take in a step, and return whether the link is to be probed now, before the next one."""
        self.steps += 1
        if self.steps == 1:  # it allocates memory; and what was sent may be the start of a compressor
            return False
        self.recent = [*self.recent, step][-_RECENT:]
        if self.steps <= _VISIT:
            return self.steps == _VISIT
        is_due = self.steps >= _VISIT + self.rule.look
        return is_due or self.favourite is not None or self._has_changed(step)

    def decide(self, link: Link) -> tuple[int, str] | None:
        """Take in what a probe found after the last step, and return the candidate to move to, and why, if any."""
        was, self.link, is_first = self.link, link, self.samples[self.candidate] is None
        if was is not None and not self._are_alike(was, link):
            self.recent = self.recent[-1:]  # the others were on the former link
        self._sample(link)
        self.steps = _VISIT
        samples = [sample for sample in self.samples if sample is not None]
        if len(samples) < len(self.samples):
            return self.follow(self.samples.index(None)), "to measure it"
        predicted = [sample.seconds_on(link, self._hidden()) for sample in samples]
        own, tied = predicted[self.candidate], (1 + _TIE * self.rule.margin) * min(predicted)
        best = next(number for number, seconds in enumerate(predicted) if seconds <= tied)
        if best == self.candidate or (best > self.candidate and predicted[best] > (1 - self.rule.margin) * own):
            self.favourite = None
            return None
        # A small gain must be predicted twice in a row: one probe may be wrong, and moves would undo each other.
        if not is_first and self.favourite != best and own < _URGENT * predicted[best]:
            self.favourite = best
            return None
        of_link = f"{link}" if was is None else f"{link} (was {was})"
        times = f"{seconds_in_words(own)} a step, predicted {seconds_in_words(predicted[best])}"
        return self.follow(best), f"{of_link}: {times}"

    def follow(self, candidate: int) -> int:
        """Take in that this candidate, which is returned, is in use from the next step on."""
        self.candidate, self.steps, self.recent, self.favourite = candidate, 0, [], None
        return candidate

    def _has_changed(self, step: StepTimes) -> bool:
        """Return whether a step waited longer or shorter than the candidate's last measured one."""
        sample = self.samples[self.candidate]
        return sample is not None and abs(step.waiting - sample.step.waiting) > _CHANGE * sample.step.seconds

    def _hidden(self) -> float:
        """Return the longest waiting of any sample that overlapped with compute."""
        return max(0.0, *(sample.step.waiting - sample.step.exposed for sample in self.samples if sample is not None))

    def _sample(self, link: Link) -> None:
        """Keep the shortest recent step as the candidate's."""
        new, known = Sample(min(self.recent, key=lambda one: one.seconds), link), self.samples[self.candidate]
        if known is not None and self._are_alike(known.link, link):
            # Steps differ by chance, so what was expected counts as much as what was seen. What else slows a step down,
            # the model's work or the machine's, does so with every candidate.
            half = (new.step.seconds - known.seconds_on(link, self._hidden())) / 2
            new = new.slower_by(-half)
            if self.steps > _VISIT:
                self.samples = [sample and sample.slower_by(half) for sample in self.samples]
        self.samples[self.candidate] = new

    def _are_alike(self, one: Link, other: Link) -> bool:
        """Return whether two links are the same to the candidate in use, as far as probes can tell."""
        step = self.recent[-1]
        shorter, longer = sorted(link.seconds(step.data, step.hops) for link in (one, other))
        return longer <= max(_SAME * shorter, shorter + _SHORT * step.seconds)
