"""The state of a reducer: its hook and features, an iteration's phase, what it waits for, how an error ends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto

import torch.distributed as dist

from ddp_core import errors
from ddp_core.buckets import Layout
from ddp_core.feature import Feature, Found
from ddp_core.hooks import CommHook, Pending


class Phase(Enum):
    """The phase of an iteration.

    ::

        IDLE ──> EXPECTING ──> REDUCING ──> REDUCED ──> EXPECTING, or IDLE

    A forward pass leads out of REDUCED: to EXPECTING or, if it does not synchronise, to IDLE. An error in a hook or a
    collective leads from any phase to FAILED, which only another process group ends.
    """

    IDLE = auto()  # there is nothing to reduce
    EXPECTING = auto()  # a forward pass has prepared for a backward pass that synchronises
    REDUCING = auto()  # its first gradient has come, and its end has not
    REDUCED = auto()  # gradients are means, or will be after waiting for all buckets: any further one is late
    FAILED = auto()  # some gradients are means and some are not, differently on every rank: nothing may follow


@dataclasses.dataclass
class Iteration:
    """How far an iteration has come."""

    number: int = 0  # of synchronised forward passes begun
    phase: Phase = Phase.IDLE
    remaining: list[int] = dataclasses.field(default_factory=list)  # for each parameter: gradients to come
    order: list[int] = dataclasses.field(default_factory=list)  # parameters, as they became ready
    in_flight: list[Pending | None] = dataclasses.field(default_factory=list)  # of buckets launched; None: left out
    divisor: int = 1
    failure: str = ""  # what has led to FAILED


class Lifecycle:
    """The part of a reducer that counts and reduces nothing: its settings, its state, and its errors."""

    def __init__(self, layout: Layout, process_group: dist.ProcessGroup):
        self.layout = layout
        self.process_group = process_group
        self.hook: CommHook | None = None
        self.iteration = Iteration()
        self.last_error = ""  # for the logging data
        self.features: list[Feature] = []
        self.observers: list[Feature] = []  # those of the features that look at every gradient

    def add(self, feature: Feature, *, first: bool = False) -> None:
        """Call a feature at its moments, after those that were added before, or as the first."""
        self.features.insert(0 if first else len(self.features), feature)
        if type(feature).on_gradient is not Feature.on_gradient:
            self.observers.append(feature)
        feature.added(self)

    def remove(self, feature: Feature) -> None:
        """Call a feature no more."""
        for features in (self.features, self.observers):
            features[:] = [one for one in features if one is not feature]

    def find(self, kind: type[Found]) -> Found | None:
        """Return the feature of a kind, if there is one."""
        return next((one for one in self.features if isinstance(one, kind)), None)

    def set_hook(self, hook: CommHook | None) -> None:
        """Reduce with ``hook`` from now on; None: with an all-reduce. Raises RuntimeError in a backward pass."""
        if self.is_reducing:
            raise errors.amid_reduction("a communication hook cannot be registered, replaced or removed")
        self.hook = hook

    @property
    def is_reducing(self) -> bool:
        """True from an iteration's first gradient to the end of its backward pass."""
        return self.iteration.phase is Phase.REDUCING

    @property
    def is_unfinished(self) -> bool:
        """True if a reduction was begun that has not ended, or never will."""
        return self.iteration.phase in (Phase.REDUCING, Phase.FAILED)

    def waits(self) -> str:
        """Return how far the iteration has come, and what the next bucket waits for, in words."""
        step, buckets = self.iteration, self.layout.buckets
        launched = len(step.in_flight)
        text = f"phase {step.phase.name} of iteration {step.number}: {launched} of {len(buckets)} buckets launched"
        if launched == len(buckets):
            return text
        names = [self.layout.names[index] for index in buckets[launched].indices if step.remaining[index] > 0]
        return f"{text}, bucket {launched} waits for {errors.listed(names)}"

    def require_finished(self) -> None:
        """Raise RuntimeError, naming the missing parameters, if a reduction was begun and not finished."""
        step = self.iteration
        if step.phase is Phase.FAILED:
            raise self.noted(errors.interrupted(step.failure))
        if self.is_reducing:
            error = next(filter(None, (feature.why_unfinished(self) for feature in self.features)), None)
            raise self.noted(error or self.unfinished(errors.MAYBE_UNUSED))

    def unfinished(self, advice: str) -> RuntimeError:
        """Return the error for a backward pass that left parameters without a gradient."""
        missing = [index for index, left in enumerate(self.iteration.remaining) if left > 0]
        rank = self.process_group.rank()
        return errors.unfinished(advice, missing, self.layout.names, rank, self.waits())

    @contextmanager
    def failing(self, in_flight: Sequence[Pending | None]) -> Iterator[None]:
        """Allow no later step if the body raises, since some gradients are then means, and others not."""
        try:
            yield
        except BaseException as error:  # Ctrl-C too
            for feature in self.features:
                feature.on_failure(in_flight)
            self.iteration.phase = Phase.FAILED
            self.iteration.failure = f"{type(error).__name__}: {error}"  # not the error: its frames hold the reducer
            raise

    def noted(self, error: RuntimeError) -> RuntimeError:
        """Keep an error's text for the logging data, and return the error."""
        self.last_error = str(error)
        return error

    def reset(self, process_group: dist.ProcessGroup) -> None:
        """Start over with other ranks, even after a failure; buckets will be rebuilt after the next backward pass."""
        self.process_group, self.iteration = process_group, Iteration()
        self.layout.learns_order, self.layout.order, self.layout.rebuilt = True, [], False
        for feature in self.features:
            feature.added(self)
