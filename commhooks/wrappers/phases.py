"""The phases of a compressor, between which one compressor in a schedule takes over from another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from commhooks.language.compressor import Compressor, inner_of, loss_of_a_matrix
from commhooks.wrappers.hierarchical import Hierarchical
from commhooks.wrappers.per_parameter import PerParameter
from commhooks.wrappers.start_after import StartAfter
from commhooks.wrappers.wrapper import Wrapper

_PASSED_ON = (Compressor.state, Wrapper.state, Hierarchical.state, PerParameter.state, StartAfter.state)
"""The `state` methods of classes without entries of their own: they declare those of the compressors in their
settings."""


class Phase(NamedTuple):
    """The steps from one switch to the next."""

    begin: int
    """The first step."""
    is_guarded: bool
    """True if there may be state to guard. It is the same on every rank, because guards lengthen messages."""


def phases_of(compressor: Compressor) -> tuple[Phase, ...]:
    """Return a compressor's phases in order, beginning at step 0."""
    switches = sorted(one.steps for one in _running(compressor, None) if isinstance(one, StartAfter))
    return tuple(Phase(step, any(map(_is_guarded, _running(compressor, step)))) for step in (0, *switches))


def _running(compressor: Compressor, step: int | None) -> Iterator[Compressor]:
    """Yield a compressor and those in its settings, at any depth, that run in a step; None: in any step."""
    yield compressor
    inner = inner_of(compressor)
    if step is not None and isinstance(compressor, StartAfter):
        inner = [compressor.in_turn(step)]
    for one in inner:
        yield from _running(one, step)


def _is_guarded(compressor: Compressor) -> bool:
    """Return whether a compressor declares state itself, or would get some from `ErrorFeedback`.

    It therefore sends as much without error feedback as with it, and the two can be compared.
    """
    if type(compressor).state in _PASSED_ON:
        return not inner_of(compressor) and loss_of_a_matrix(compressor).is_worth_keeping
    return True
