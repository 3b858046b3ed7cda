"""What carries messages in a simulation, and what that costs a rank's processor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from commhooks.communicators.links import Link
from commhooks.planning.costs import Costs, copy_seconds
from commhooks.planning.predicting import Prediction, Unlinked
from commhooks.planning.step_time import Bucket, Stage, Step
from commhooks.units import bytes_in_words, three_digits

from .request import Request


@dataclass(frozen=True)
class Carrier:
    """A backend, with the costs that `estimate` uses for it too."""

    backend: str
    copy: float  # seconds in which the processor copies an element of fp32
    costs: Costs

    @classmethod
    def of(cls, request: Request, factor: float = 1.0) -> Carrier:
        """Return the backend asked for; a copy that is timed here takes `factor` times as long on the processor."""
        if request.copy_rate is not None:
            copy = 4 / request.copy_rate
        else:
            copy = factor * copy_seconds() if request.backend == "gloo" else 0.0
        return cls(request.backend, copy, Costs.read())

    def time(self, step: Unlinked, link: Link, hook: str) -> Prediction:
        """Return the time of a step under a hook on a link."""
        carried = self.costs.carried_by(self.backend, link, hook, self.copy)
        rounds = self.costs.seconds_of_a_round(self.backend)
        return dataclasses.replace(step, step=_with_rounds(step.step, rounds)).over(carried)

    def in_words(self) -> str:
        """Return a sentence."""
        if self.backend == "none":
            return (
                "Backend: none. What sending costs the processor is not counted; --backend gloo counts what Gloo takes."
            )
        a_byte = self.costs.hooks["all-reduce"].copies_per_byte * self.copy / 4
        return (
            f"Backend: gloo. For each byte of fp32 that it sends, the processor is busy for "
            f"{three_digits(1e9 * a_byte)} ns, as measured for this version, times a copy of memory "
            f"({bytes_in_words(4 / self.copy)}/s). A message takes {1e6 * self.costs.hop_seconds:.0f} µs more, and a "
            f"round {1e6 * self.costs.round_seconds:.0f} µs."
        )


def _with_rounds(step: Step, seconds: float) -> Step:
    """Return a step in which each answer is followed by so many seconds more of the processor."""
    if not seconds:
        return step
    buckets = tuple(
        Bucket(
            bucket.ready,
            tuple(
                Stage(stage.seconds + (seconds if place else 0.0), stage.collectives)
                for place, stage in enumerate(bucket.stages)
            ),
            bucket.after + (seconds if bucket.stages else 0.0),
        )
        for bucket in step.buckets
    )
    return dataclasses.replace(step, buckets=buckets)
