"""The phases of an iteration: how one follows the other, and how an exception ends them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from ddp_core.hooks import Pending
from ddp_core.watch import give_up


class Phase(Enum):
    """What a reducer is doing.

    ::

        IDLE ──> EXPECTING ─┬─> REDUCING ─┬─> REDUCED ──> EXPECTING, or IDLE
                            └─> LEARNING ─┘

    A forward pass leads out of REDUCED: to EXPECTING, or, if it does not synchronise, to IDLE. What a hook or a
    collective raises leads from anywhere to FAILED. Out of FAILED leads another process group alone, and to IDLE.
    """

    IDLE = auto()  # there is nothing to reduce
    EXPECTING = auto()  # a forward pass has prepared for a backward pass that synchronises
    REDUCING = auto()  # its first gradient has come, and its end has not
    LEARNING = auto()  # the same in a static graph's first iteration: nothing is launched before all has fired
    REDUCED = auto()  # gradients are means, or will be once all buckets were waited for: one that still comes is late
    FAILED = auto()  # some gradients are means and some are not, others on every rank: nothing may follow


class Progress:
    """The phase of one reducer, and the errors that it has run into."""

    def __init__(self) -> None:
        self.last_error: str | None = None  # for the logging data
        self.reset()

    def reset(self) -> None:
        """Begin anew, even after a failure."""
        self.phase = Phase.IDLE
        self.failure = ""  # in FAILED: what has led there

    def enter(self, phase: Phase) -> None:
        """Go on to ``phase``, but stay in FAILED: what still runs after a failure must not hide it."""
        if self.phase is not Phase.FAILED:
            self.phase = phase

    @property
    def reducing(self) -> bool:
        """True from an iteration's first gradient to the end of its backward pass."""
        return self.phase in (Phase.REDUCING, Phase.LEARNING)

    @contextmanager
    def fatal(self, in_flight: Iterable[Pending | None]) -> Iterator[None]:
        """Let no later step run if what is done within raises: some gradients are means then, and some are not."""
        try:
            yield
        except BaseException as error:  # Ctrl-C too
            give_up(pending.future() for pending in in_flight if pending is not None and pending.group is not None)
            self.enter(Phase.FAILED)
            self.failure = f"{type(error).__name__}: {error}"  # not the error: it holds frames, and these the reducer
            raise

    def noted(self, error: RuntimeError) -> RuntimeError:
        """Keep an error's text for the logging data, and return the error."""
        self.last_error = str(error)
        return error
