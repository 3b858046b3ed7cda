"""A profile's results: where the time of a model's steps goes, measured on the ranks that train it.

All seconds are medians over steps, taken from the slowest rank of each step unless a field says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from commhooks.experiments import stored
from commhooks.experiments.planning.errors import ProfileError
from commhooks.experiments.timing.step_time import Sends

FORMAT = 1  # of the file; increased when readers must change
LITTLE_TO_WIN = 1.1
"""Below this bound a compressor, which costs compute itself, can hardly pay."""


@dataclasses.dataclass(frozen=True)
class Seconds:
    """A time, in seconds, with its spread over the steps."""

    median: float
    low: float
    """The lower quartile."""
    high: float
    """The upper quartile."""


@dataclasses.dataclass(frozen=True)
class StepParts:
    """A step's time by phase; forward + backward + exposed + optimizer = the median of the seconds.

    The proportions are those of the steps between the quartiles.
    """

    seconds: Seconds
    forward: float
    """Seconds from the beginning of the step to the end of the loss."""
    backward: float
    """Until the last gradient: compute."""
    exposed: float
    """The rest of the backward pass, in which nothing is computed: communication and compression."""
    optimizer: float
    """The rest of the step."""
    steps: int
    """The number of measured steps."""

    def lasting(self, seconds: float) -> StepParts:
        """Return the same step with a total of `seconds`; the difference is added to `exposed`."""
        more = seconds - self.seconds.median
        whole = Seconds(seconds, self.seconds.low + more, self.seconds.high + more)
        return dataclasses.replace(self, seconds=whole, exposed=self.exposed + more)


@dataclasses.dataclass(frozen=True)
class GradientProfile:
    """One parameter's gradient."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    ready: float
    """Seconds from the beginning of the step, under the noop hook."""


@dataclasses.dataclass(frozen=True)
class RoundProfile:
    """One round of a bucket's exchange."""

    seconds: float
    """Seconds of compression before its collectives start: CPU time if the worker thread shares a core with the
    backward pass (`Profile.cores == 1`), otherwise wall-clock time."""
    sends: Sends


@dataclasses.dataclass(frozen=True)
class BucketProfile:
    """A bucket under one hook."""

    parameters: tuple[str, ...]
    bytes: int
    ready: float
    """Seconds from the beginning of the step until it was handed to the hook."""
    rounds: tuple[RoundProfile, ...]
    after: float
    """Seconds of compression after the last answer."""


@dataclasses.dataclass(frozen=True)
class HookProfile:
    """Steps under one compressor whose collectives were answered at once, without a link.

    So it holds all that the hook costs a real step, thread hand-offs and shared caches included, except transfers.
    """

    hook: str
    """The hook in text form: 'powersgd:rank=4'."""
    policy: str
    """"fifo" or "fused"."""
    step: StepParts
    buckets: tuple[BucketProfile, ...]
    """The buckets, in the order in which they became ready."""
    state_bytes: int = 0
    """Memory that the compressor keeps between steps, on the rank that keeps most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A model's steps in its DistributedDataParallel."""

    model: str
    """The class of the model, or the name of the task."""
    ranks: int
    """The number of ranks, real or pretended, with which hooks were measured."""
    ddp: str
    """"core" or "torch"."""
    cores: int
    """2 if each rank has a free core for its worker thread besides the backward pass's, otherwise 1."""
    plain: StepParts
    """The step under the DDP's own all-reduce, over the link."""
    noop: StepParts
    """The step without communication."""
    gradients: tuple[GradientProfile, ...]
    """The gradients, in the order in which they became ready."""
    hooks: Mapping[str, HookProfile]
    """The profile of each hook, by its label; "noop" and "allreduce" are always there."""
    own_share: float
    """The profiler's own time as a part of the step under the noop hook, summed over its callbacks."""
    link: str = ""
    """The name of the link under the plain all-reduce, as the user gave it."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    machine: str = ""
    load: float | None = None
    """The machine's load average over the minute before the measurement ended; None: not known."""

    @property
    def bound(self) -> float:
        """The speed-up if communication cost nothing: plain over noop."""
        return self.plain.seconds.median / self.noop.seconds.median

    def verdict(self) -> str:
        """Return what the bound says, in a sentence."""
        low = self.plain.seconds.low / self.noop.seconds.high
        high = self.plain.seconds.high / self.noop.seconds.low
        if low <= 1 <= high or self.bound < LITTLE_TO_WIN:
            end = "communication is not your bottleneck"
        else:
            end = f"communication takes {1 - 1 / self.bound:.0%} of a step"
        return f"at most {max(1.0, self.bound):.2f}× to be won ({max(1.0, low):.2f} to {max(1.0, high):.2f}): {end}"

    def write(self, path: Path) -> None:
        """Write the profile into a JSON file."""
        stored.write(self, path, form=FORMAT)

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Return the profile in a file.

        Raises:
            ProfileError: There is no such file, or it holds something else.

        """
        try:
            return stored.read(cls, path, form=FORMAT)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ProfileError(
                f"profile {path}: expected a file of format {FORMAT} that Profile.write wrote "
                f"({type(error).__name__}: {error}); profile again."
            ) from error
