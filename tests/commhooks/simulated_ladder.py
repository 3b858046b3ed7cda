"""A ladder of compressors on simulated links: what `Decider` sees there, by the step-time model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from commhooks.planning.deciding import Decider, Move, Seen, link_of
from commhooks.planning.links import Link
from commhooks.planning.rule import AdaptiveRule
from commhooks.planning.step_time import Bucket, Stage, Step, step_time

RANKS = 2
FAST, SLOW = Link(rate=1e9, latency=1e-4), Link(rate=1e8, latency=1e-4)
COMPUTE = 0.06
_READY = (0.03, 0.04, 0.05, 0.06)
_ELEMENTS = 450_000  # of a bucket


def rung(kind: str, payload: int, compression: float, policy: str = "fifo", compute: float = COMPUTE) -> Step:
    """Return a step whose four buckets each send a payload, after so many seconds of compression."""
    buckets = tuple(
        Bucket(ready * compute / COMPUTE, (Stage(compression / 4, ((kind, payload),)),)) for ready in _READY
    )
    return Step(compute=compute, buckets=buckets, policy=policy, cores=1)


def ladder(policy: str = "fifo", compute: float = COMPUTE) -> list[Step]:
    """Return dense, fp16, int8 in two hops, and two ranks of PowerSGD, with costs as on one core."""
    return [
        rung("all-reduce", 4 * _ELEMENTS, 0.0, policy, compute),
        rung("all-reduce", 2 * _ELEMENTS, 0.004, policy, compute),
        rung("all-to-all", 2 * _ELEMENTS, 0.02, policy, compute),
        rung("all-reduce", 80_000, 0.009, policy, compute),
        rung("all-reduce", 20_000, 0.007, policy, compute),
    ]


class Run:
    """A run of a ladder over a link that may differ from step to step."""

    def __init__(
        self,
        steps: Sequence[Step],
        link: Callable[[int], Link],
        *,
        rung: int = 0,
        rule: AdaptiveRule | None = None,
        noise: float = 0.0,
        late: Callable[[int], float] = lambda step: 0.0,
        compute: Callable[[int], Sequence[Step]] | None = None,
        seed: int = 0,
    ) -> None:
        self.ladder, self.link, self.noise, self.late = steps, link, noise, late
        self.decider = Decider(len(steps), RANKS, rung, rule or AdaptiveRule())
        self.ladder_at = compute or (lambda step: steps)
        self.random = random.Random(seed)
        self.now = 0
        self.seconds: list[float] = []
        self.rungs: list[int] = []
        self.moves: list[tuple[int, Move]] = []
        self.probes: list[int] = []

    def go_on(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            link = self.link(self.now)
            step = self.ladder_at(self.now)[self.decider.rung]
            self.rungs.append(self.decider.rung)
            seen = self._seen(step, link)
            self.seconds.append(seen.seconds)
            if self.decider.take(seen):
                self.probes.append(self.now)
                move = self.decider.decide(self._probed(link))
                if self.decider.link is not None and len(self.probes) == 1:
                    assert move is not None, "the first probe sends the controller to the next rung"
                if move is not None:
                    self.moves.append((self.now, move))
            self.now += 1

    def moves_after(self, step: int) -> list[tuple[int, int, int]]:
        """Return the moves from a step on: (step, source, target)."""
        return [(now, move.source, move.target) for now, move in self.moves if now >= step]

    def best(self, link: Link) -> float:
        """Return the seconds of the fastest rung's step."""
        return min(step_time(step, link, RANKS).seconds for step in self.ladder)

    def _seen(self, step: Step, link: Link) -> Seen:
        time = step_time(step, link, RANKS)
        late = self.late(self.now)
        payloads: Counter[str] = Counter()
        numbers: Counter[str] = Counter()
        for bucket in step.buckets:
            for stage in bucket.stages:
                for kind, payload in stage.collectives:
                    payloads[kind] += payload
                    numbers[kind] += 1
        return Seen(
            seconds=self._noisy(time.seconds) + late,
            waiting=self._noisy(time.communication) + late,
            exposed=self._noisy(time.seconds - time.compute) + late,
            sends=tuple((kind, payloads[kind], numbers[kind]) for kind in payloads),
        )

    def _probed(self, link: Link) -> Link:
        payload = self.decider.probe_bytes()
        small, large = (link.transfer("all-reduce", size, RANKS).seconds for size in (4, payload))
        return link_of(self._noisy(small), self._noisy(large), payload, RANKS)

    def _noisy(self, seconds: float) -> float:
        return seconds * (1 + self.noise * self.random.random())
