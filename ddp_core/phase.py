"""The phases of an iteration: their order, and their end by an exception."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from ddp_core.hooks import Pending
from ddp_core.watch import give_up


class Phase(Enum):
    """A phase of a reducer's iteration.

    ::

        IDLE ──> EXPECTING ─┬─> REDUCING ─┬─> REDUCED ──> EXPECTING, or IDLE
                            └─> LEARNING ─┘

    A forward pass leads out of REDUCED: to EXPECTING or, if it does not synchronise, to IDLE. An error in a hook or a
    collective leads from any phase to FAILED. Only a new process group leads out of FAILED, to IDLE.
    """

    IDLE = auto()  # there is nothing to reduce
    EXPECTING = auto()  # a forward pass has prepared for a backward pass that synchronises
    REDUCING = auto()  # its first gradient has come, and its end has not
    LEARNING = auto()  # the same in a static graph's first iteration: nothing is launched before all have fired
    REDUCED = auto()  # gradients are means, or will be after waiting for all buckets: any further one is late
    FAILED = auto()  # some gradients are means and some are not, differently on every rank: nothing may follow


class Progress:
    """The phase of one reducer, and the errors that it has run into."""

    def __init__(self) -> None:
        self.last_error: str | None = None  # for the logging data
        self.reset()

    def reset(self) -> None:
        """Start over, even after a failure."""
        self.phase = Phase.IDLE
        self.failure = ""  # in FAILED: what has led there

    def enter(self, phase: Phase) -> None:
        """Enter ``phase``, but stay in FAILED: code that still runs after a failure must not hide it."""
        if self.phase is not Phase.FAILED:
            self.phase = phase

    @property
    def reducing(self) -> bool:
        """True from an iteration's first gradient to the end of its backward pass."""
        return self.phase in (Phase.REDUCING, Phase.LEARNING)

    @contextmanager
    def fatal(self, in_flight: Iterable[Pending | None]) -> Iterator[None]:
        """Allow no later step if the body raises, since some gradients are then means, and others not."""
        try:
            yield
        except BaseException as error:  # Ctrl-C too
            give_up(pending.future() for pending in in_flight if pending is not None and pending.group is not None)
            self.enter(Phase.FAILED)
            self.failure = f"{type(error).__name__}: {error}"  # not the error: its frames hold the reducer
            raise

    def noted(self, error: RuntimeError) -> RuntimeError:
        """Keep an error's text for the logging data, and return the error."""
        self.last_error = str(error)
        return error
