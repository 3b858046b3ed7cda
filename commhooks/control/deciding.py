"""The choice of a compressor from a ladder as the link changes, made from what a rank measures between two steps.

The decision is a function of numbers that are the same on every rank, and of what was decided before: no clock, no
process group, nothing random. `Adaptive` measures the numbers, exchanges them, and acts.

Each rung is described by the bytes that it sent in a step, and by the time of its steps. If a step of a rung took T
seconds on a link where its collectives need N seconds (`Link.transfer`), then on a link where they need N' it should
take

    T + max(0, N' - H) - max(0, N - H)

with H, the seconds of communication that the backward pass hides: the most seen so far of waiting less exposed waiting;
and no less than the step took without its exposed waiting. The step nearest to N' is taken, so that a link that comes
back finds what was measured on it before.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from commhooks.communicators.gloo import MESSAGE_BYTES, course_of
from commhooks.communicators.links import Link
from commhooks.control.remembered import Memory, OnLink, Rung, Sends
from commhooks.control.rule import FullRule
from commhooks.units import seconds_in_words, three_digits

_SAME = 1.25  # seconds on the link within this factor of each other count as the same link
_SHORT = 0.02  # of a step: differences below it do as well
_RECENT = 3  # steps whose shortest counts as the rung's
_KEPT = 8  # links of which each rung's step time is remembered
_MOST = 0.8  # of a step: above it, a change of waiting is always looked into
_CALM = 0.8  # by which that limit is lowered at every probe that was due
_PROBE_SHARE = 1 / 32  # of a step, that a probe should take
_SMALLEST_PROBE, _LARGEST_PROBE = 1 << 14, 1 << 22  # bytes


@dataclasses.dataclass(frozen=True)
class Seen:
    """A step as all ranks see it, in seconds."""

    seconds: float
    """Seconds of the whole step, on the slowest rank."""
    waiting: float
    """Seconds of waiting for collectives, on the rank that waited least: the last rank to arrive waits for the link
    alone."""
    exposed: float
    """Seconds of waiting that the backward pass did not hide, the largest over ranks."""
    sends: Sends


@dataclasses.dataclass(frozen=True)
class Move:
    """A change of rungs."""

    source: int
    target: int
    reason: str


class Decider:
    """Choices for a ladder of `rungs` rungs, the same on every rank."""

    def __init__(self, rungs: int, ranks: int, rung: int, rule: FullRule) -> None:
        self.ranks, self.rule = ranks, rule
        self._memory = Memory(rung, [Rung() for _ in range(rungs)], change=rule.change)

    @property
    def rung(self) -> int:
        """The rung in use, from 0."""
        return self._memory.rung

    @property
    def link(self) -> Link | None:
        """The link as it was last probed; None before that."""
        memory = self._memory
        return Link(rate=memory.rate, latency=memory.latency) if memory.rate else None

    def take(self, seen: Seen) -> bool:
        """Take in a step, and return whether the link is to be probed now, before the next one."""
        memory, rule = self._memory, self.rule
        memory.judged += 1
        memory.since_move += 1
        if memory.since_move == 1:  # it allocates memory; and what was sent may be the start of a compressor
            return False
        memory.rungs[memory.rung].sends = seen.sends
        memory.since_probe += 1
        is_settled = memory.since_move > rule.visit
        steps = [*memory.recent, (seen.seconds, seen.waiting, seen.exposed)]
        limit = memory.change * min(seconds for seconds, _, _ in steps)
        memory.has_changed = is_settled and abs(seen.waiting - memory.waiting) > limit
        memory.recent = steps[-1:] if memory.has_changed else steps[-_RECENT:]
        if not is_settled:
            return memory.since_move == rule.visit
        is_due = memory.since_probe >= (rule.look if self._hopes() else rule.idle_look)
        if is_due:
            memory.change = max(rule.change, _CALM * memory.change)
        return memory.has_changed or memory.favourite is not None or is_due

    def probe_bytes(self, link: Link | None = None) -> int:
        """Return how many bytes a probe should send on a link; on an unknown one, few."""
        link = link or self.link
        if link is None:
            return _SMALLEST_PROBE
        seconds = min(seconds for seconds, _, _ in self._memory.recent) * _PROBE_SHARE
        payload = link.rate / 8 * seconds * self.ranks / (2 * (self.ranks - 1))
        return round(min(_LARGEST_PROBE, max(_SMALLEST_PROBE, payload)))

    def decide(self, link: Link) -> Move | None:
        """Take in what a probe found after the last step, and return where to move, if anywhere."""
        memory, rule = self._memory, self.rule
        was, memory.rate, memory.latency = self.link, link.rate, link.latency
        memory.since_probe = 0
        if memory.has_changed and memory.favourite is None and was is not None and self._are_alike(was, link):
            # The link is as it was: one step was late, for whatever reason. It takes more to look again. (With a
            # favourite it changed one step ago, and that step was only partly on the new link.)
            memory.change = min(_MOST, 2 * memory.change)
            return None
        last, memory.waiting, _ = memory.recent[-1]
        self._learn(link)
        unknown = [number for number, rung in enumerate(memory.rungs) if not rung.steps]
        if unknown:
            return self._move(unknown[0], "to measure it")
        predicted = self.predicted(link)
        is_urgent = last >= rule.urgent * min(predicted) or memory.before is None
        memory.before = memory.rung if memory.before is None else memory.before
        best = self._best(predicted, everyone=is_urgent)
        own = predicted[memory.rung]
        if best == memory.rung or (best > memory.rung and predicted[best] > (1 - rule.margin) * own):
            memory.favourite = None
            return None
        if not is_urgent and memory.favourite != best:
            memory.favourite = best
            return None
        link_in_words = _in_words(link) if was is None else f"{_in_words(link)} (was {_in_words(was)})"
        return self._move(
            best, f"{link_in_words}: {seconds_in_words(own)} a step, predicted {seconds_in_words(predicted[best])}"
        )

    def follow(self, rung: int) -> None:
        """Take in that another rung is in use from the next step on."""
        memory = self._memory
        memory.rung, memory.since_move, memory.before, memory.favourite = rung, 0, None, None
        memory.recent, memory.change = [], self.rule.change

    def predicted(self, link: Link) -> list[float]:
        """Return the seconds of a step of each rung on a link; all rungs must have run."""
        return [self._predict(rung, self._network(rung, link)) for rung in self._memory.rungs]

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return self._memory.as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; raise `CheckpointError` for anything else."""
        self._memory = Memory.from_dict(state, len(self._memory.rungs))

    def _learn(self, link: Link) -> None:
        """Keep what the rung in use takes on this link."""
        memory = self._memory
        own, seconds = memory.rungs[memory.rung], min(seconds for seconds, _, _ in memory.recent)
        memory.hidden = max(
            memory.hidden, statistics.median(waiting - exposed for _, waiting, exposed in memory.recent)
        )
        network, known = self._network(own, link), self._known(link)
        if known is not None:
            expected = self._predict(own, network)
            own.steps.remove(known)
            seconds = (expected + seconds) / 2  # steps differ by chance
            if memory.since_move > self.rule.visit:
                self._shift(seconds - expected, doubt=(_SAME - 1) * max(0.0, network - memory.hidden))
        least = max(0.0, min(seconds - exposed for seconds, _, exposed in memory.recent))
        own.steps = [*own.steps, OnLink(network, seconds, least)][-_KEPT:]

    def _are_alike(self, one: Link, other: Link) -> bool:
        """Return whether two links are the same to the rung in use."""
        own = self._memory.rungs[self._memory.rung]
        networks = self._network(own, one), self._network(own, other)
        return _are_same(*networks, self._predict(own, networks[0]))

    def _known(self, link: Link) -> OnLink | None:
        """Return what the rung in use took on a link like this one, if it ran on any."""
        own = self._memory.rungs[self._memory.rung]
        network = self._network(own, link)
        alike = [one for one in own.steps if _are_same(one.network, network, one.seconds)]
        return min(alike, key=lambda one: abs(one.network - network), default=None)

    def _shift(self, seconds: float, doubt: float) -> None:
        """Let steps take longer on every rung, on every link.

        What slows a step down besides the link, the model's work or the machine's, does so on every rung. Of this, as
        much is left out as a probe that is a little wrong would explain.
        """
        shift = math.copysign(max(0.0, abs(seconds) - doubt), seconds)
        for rung in self._memory.rungs:
            rung.steps = [one.slower_by(shift) for one in rung.steps]

    def _network(self, rung: Rung, link: Link) -> float:
        """Return the seconds that a rung's collectives need on a link."""
        return math.fsum(
            number * link.transfer(kind, payload // number, self.ranks).seconds for kind, payload, number in rung.sends
        )

    def _predict(self, rung: Rung, network: float) -> float:
        hidden = self._memory.hidden
        near = min(rung.steps, key=lambda one: abs(one.network - network))
        return max(near.least, near.seconds + max(0.0, network - hidden) - max(0.0, near.network - hidden))

    def _hopes(self) -> bool:
        """Return whether another rung would pay on a link without limit."""
        memory = self._memory
        if any(not rung.steps for rung in memory.rungs):
            return True
        predicted = self.predicted(Link(rate=math.inf))
        best = self._best(predicted, everyone=True)
        return best < memory.rung or predicted[best] < (1 - self.rule.margin) * predicted[memory.rung]

    def _best(self, predicted: Sequence[float], *, everyone: bool) -> int:
        """Return the first rung that is about as fast as the fastest, among rungs that are not banned, or among all."""
        memory = self._memory
        numbers = [
            number
            for number, rung in enumerate(memory.rungs)
            if everyone or number == memory.rung or rung.banned_until <= memory.judged
        ]
        limit = (1 + self.rule.tie) * min(predicted[number] for number in numbers)
        return next(number for number in numbers if predicted[number] <= limit)

    def _move(self, target: int, reason: str) -> Move:
        memory, source = self._memory, self._memory.rung
        is_calibrated = all(rung.steps for rung in memory.rungs)
        if is_calibrated and target == memory.before and memory.since_move <= self.rule.regret:
            left = memory.rungs[source]
            left.ban = max(self.rule.regret, 2 * left.ban)
            left.banned_until = memory.judged + left.ban
        self.follow(target)
        memory.before = source if is_calibrated else None
        return Move(source, target, reason)


_SMALL = 4  # bytes


def link_of(seconds_of_small: float, seconds: float, payload: int, ranks: int) -> Link:
    """Fit a `Link` to the seconds of a 4-byte and a `payload`-byte all-reduce."""
    (small, steps), (large, _) = (_on_link(payload, ranks) for payload in (_SMALL, payload))
    on_wire = max(seconds - seconds_of_small, 0.1 * seconds)  # noise may make the large one the faster
    rate = 8 * (large - small) / on_wire
    return Link(rate=rate, latency=max(0.0, seconds_of_small - 8 * small / rate) / steps)


def _on_link(payload: int, ranks: int) -> tuple[float, int]:
    """Return the bytes of an all-reduce on the link, with headers and messages, and its steps."""
    course = course_of("all-reduce", payload, ranks)
    return course.up_bytes * course.overhead + MESSAGE_BYTES * course.messages, course.steps


def sends_of(counts: Sequence[tuple[str, float, float]]) -> Sends:
    """Return what is sent in a step, from mean payloads and numbers of collectives, without kinds that are not."""
    return tuple((kind, round(payload), max(1, round(number))) for kind, payload, number in counts if number)


def _are_same(one: float, other: float, seconds: float) -> bool:
    """Return whether two times are close enough to come from an unchanged link."""
    return max(one, other) <= max(_SAME * min(one, other), min(one, other) + _SHORT * seconds)


def _in_words(link: Link) -> str:
    unit, size = ("Gbit/s", 1e9) if link.rate >= 1e9 else ("Mbit/s", 1e6)
    return f"{three_digits(link.rate / size)} {unit}"
