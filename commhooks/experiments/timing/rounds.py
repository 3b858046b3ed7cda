"""The time of training with DiLoCo: the step-time model over whole rounds.

A round is `every` steps. Fragment i of P has its turn at step ⌊(i + 1)·every/P⌋: its exchange begins `delay` steps
before, and at the turn the training thread waits until its mean has come. Otherwise a round is like a step of
data-parallel training with the compute of a whole round and one bucket for each fragment, each with its due moment.
Several rounds are simulated and the first ones are left out, as a delayed exchange reaches into the next round.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence

from commhooks.experiments.timing.link import Network
from commhooks.experiments.timing.step_time import Bucket, Stage, Step, StepTime, step_time

_SETTLING, _COUNTED = 32, 4  # rounds: a link that carries too little falls behind by a part of a round in each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """The steps in which ranks communicate; the fields are arguments of `commhooks.DiLoCo`."""

    every: int
    fragments: int = 1
    delay: int = 0
    shares: tuple[float, ...] = ()
    """The part of the parameters in each fragment, for the time of their exchanges; empty: equal parts."""

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= self.every or not 0 <= self.delay < self.every:
            raise ValueError(
                f"{self}: fragments must be from 1 to every, and delay from 0 to {self.every - 1}, below every"
            )
        if not self.shares:
            object.__setattr__(self, "shares", (1 / self.fragments,) * self.fragments)
        if len(self.shares) != self.fragments or not math.isclose(sum(self.shares), 1) or min(self.shares) < 0:
            raise ValueError(f"{self}: shares must be one for each fragment, at least 0, with a sum of 1")

    def turns(self) -> list[int]:
        """Return each fragment's step within a round, from 1 on."""
        return [(number + 1) * self.every // self.fragments for number in range(self.fragments)]


def part_of(exchange: Sequence[Bucket], share: float) -> Bucket:
    """Return the exchange of a fragment, whose share it is of a step's: rounds are fused, and shared out."""
    stages = []
    for of_round in itertools.zip_longest(*(bucket.stages for bucket in exchange)):
        own = [stage for stage in of_round if stage is not None]
        payloads: Counter[str] = Counter()
        for kind, payload in itertools.chain.from_iterable(stage.collectives for stage in own):
            payloads[kind] += payload
        shared = tuple(
            (kind, math.ceil(share * payload - 1e-6)) for kind, payload in payloads.items()
        )  # not 5.0…1 to 6
        stages.append(Stage(share * sum(stage.seconds for stage in own), shared))
    return Bucket(0.0, tuple(stages), share * sum(bucket.after for bucket in exchange))


def round_time(
    rounds: Rounds, exchange: Sequence[Bucket], step_seconds: float, link: Network, ranks: int, *, cores: int = 1
) -> StepTime:
    """Return a round's time, divided into computing, sending and waiting.

    Args:
        rounds: The schedule of communication.
        exchange: The compressor's work and messages for all parameters, as a step's buckets; their `ready` is ignored.
        step_seconds: Seconds of a step's compute, including its optimizer.
        link: The link between the ranks.
        ranks: The number of ranks.
        cores: The cores of each rank; with 2 or more, compression overlaps training.

    """
    fragments = [part_of(exchange, share) for share in rounds.shares]

    def first(count: int) -> StepTime:
        buckets = [
            dataclasses.replace(fragment, ready=(turn - rounds.delay) * step_seconds, due=turn * step_seconds)
            for number in range(count)
            for fragment, own in zip(fragments, rounds.turns(), strict=True)
            if (turn := number * rounds.every + own) >= rounds.delay
        ]
        compute = count * rounds.every * step_seconds
        return step_time(Step(compute=compute, buckets=tuple(buckets), cores=cores), link, ranks)

    whole, settling = first(_SETTLING + _COUNTED), first(_SETTLING)
    counted = {name: value - getattr(settling, name) for name, value in vars(whole).items()}
    return StepTime(**counted).divided(_COUNTED)
