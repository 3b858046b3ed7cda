"""A ladder of compressors on simulated links: what `Decider` sees there, by the step-time model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from commhooks.communicators.collective import ring_bytes
from commhooks.control import AdaptiveRule
from commhooks.control.decider import Decider, StepTimes
from commhooks.control.link import Link as Found
from commhooks.control.link import hops_of, link_of, probe_bytes
from commhooks.experiments.timing.link import Link
from commhooks.experiments.timing.step_time import Bucket, Stage, Step, step_time

RANKS = 2
FAST, SLOW = Link(rate=1e10, latency=1e-4), Link(rate=1e8, latency=1e-4)
COMPUTE = 0.12
_READY = (0.06, 0.08, 0.1, 0.12)
_ELEMENTS = 450_000  # of a bucket


def candidate(kind: str, payload: int, compression: float, policy: str = "fifo", compute: float = COMPUTE) -> Step:
    """Return a step whose four buckets each send a payload, after so many seconds of compression."""
    buckets = tuple(
        Bucket(ready * compute / COMPUTE, (Stage(compression / 4, ((kind, payload),)),)) for ready in _READY
    )
    return Step(compute=compute, buckets=buckets, policy=policy, cores=1)


def ladder(policy: str = "fifo", compute: float = COMPUTE) -> list[Step]:
    """Return dense, fp16, int8 in two hops, and two ranks of PowerSGD, each with its compression on the same core.

    On a fast link compression costs more than it saves; on a slow one the last two are fastest.
    """
    return [
        candidate("all-reduce", 4 * _ELEMENTS, 0.0, policy, compute),
        candidate("all-reduce", 2 * _ELEMENTS, 0.008, policy, compute),
        candidate("all-to-all", 2 * _ELEMENTS, 0.03, policy, compute),
        candidate("all-reduce", 80_000, 0.02, policy, compute),
        candidate("all-reduce", 20_000, 0.018, policy, compute),
    ]


class Run:
    """A run of a ladder over a link that may differ from step to step."""

    def __init__(
        self,
        steps: Sequence[Step],
        link: Callable[[int], Link],
        *,
        candidate: int = 0,
        noise: float = 0.0,
        late: Callable[[int], float] = lambda step: 0.0,
        late_rank: Callable[[int], float] = lambda step: 0.0,
        seed: int = 0,
    ) -> None:
        self.ladder, self.link, self.noise = steps, link, noise
        self.late, self.late_rank = late, late_rank
        self.decider = Decider(AdaptiveRule(), candidate, [None] * len(steps))
        self.random = random.Random(seed)
        self.now = 0
        self.seconds: list[float] = []
        self.candidates: list[int] = []
        self.moves: list[tuple[int, int, int]] = []
        self.probes: list[int] = []

    def go_on(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            link = self.link(self.now)
            step = self.ladder[self.decider.candidate]
            self.candidates.append(self.decider.candidate)
            seen = self.seen(step, link)
            self.seconds.append(seen.seconds)
            if self.decider.take(seen):
                self.probes.append(self.now)
                source = self.decider.candidate
                move = self.decider.decide(self._probed(link, seen.seconds))
                if move is not None:
                    self.moves.append((self.now, source, move[0]))
            self.now += 1

    def moves_after(self, step: int) -> list[tuple[int, int, int]]:
        """Return the moves from a step on: (step, source, target)."""
        return [move for move in self.moves if move[0] >= step]

    def best(self, link: Link) -> float:
        """Return the seconds of the fastest candidate's step."""
        return min(step_time(step, link, RANKS).seconds for step in self.ladder)

    def seen(self, step: Step, link: Link) -> StepTimes:
        """Return what a step shows on a link."""
        time = step_time(step, link, RANKS)
        late = self.late(self.now)
        collectives = [one for bucket in step.buckets for stage in bucket.stages for one in stage.collectives]
        return StepTimes(
            seconds=self._noisy(time.seconds) + late + self.late_rank(self.now),
            waiting=self._noisy(time.communication) + late,
            exposed=self._noisy(time.seconds - time.compute) + late + self.late_rank(self.now),
            data=math.fsum(ring_bytes(kind, payload, RANKS) for kind, payload in collectives),
            hops=math.fsum(hops_of(kind, RANKS) for kind, _ in collectives),
        )

    def _probed(self, link: Link, seconds: float) -> Found:
        payload = probe_bytes(self.decider.link, seconds, RANKS)
        small, large = (link.transfer("all-reduce", size, RANKS).seconds for size in (4, payload))
        return link_of(self._noisy(small), self._noisy(large), payload, RANKS)

    def _noisy(self, seconds: float) -> float:
        return seconds * (1 + self.noise * self.random.random())
