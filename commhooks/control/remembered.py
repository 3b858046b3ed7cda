"""A controller's memory of its ladder: plain data in checkpoints, checked entry by entry when it is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from commhooks.communicators.collective import KINDS
from commhooks.errors import CheckpointError

Sends = tuple[tuple[str, int, int], ...]
"""A rank's messages in a step: for each kind of collective (kind, total payload bytes, number)."""
_MOST_WHOLE = 2**63 - 1


class OnLink(NamedTuple):
    """The time of a rung's step on one link, in seconds."""

    network: float
    """Seconds that its collectives need on that link."""
    seconds: float
    least: float
    """Seconds of the step without exposed waiting."""

    def slower_by(self, shift: float) -> OnLink:
        """Return the same for a step in which everything but the link takes this many seconds longer."""
        return OnLink(self.network, max(0.0, self.seconds + shift), max(0.0, self.least + shift))


@dataclasses.dataclass
class Rung:
    """Everything known of a rung."""

    sends: Sends = ()
    steps: list[OnLink] = dataclasses.field(default_factory=list)
    """One for each link that it ran on, the newest last."""
    banned_until: int = 0
    ban: int = 0
    """The length of the last ban, in steps."""


@dataclasses.dataclass
class Memory:
    """All that a decision depends on, besides the settings."""

    rung: int
    rungs: list[Rung]
    judged: int = 0
    """Steps so far."""
    since_move: int = 0
    since_probe: int = 0
    recent: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)
    """(seconds, waiting, exposed) of the last steps on this rung and, as far as is known, this link; never empty once
    a step was judged."""
    hidden: float = 0.0
    """The longest waiting so far, in seconds per step, that overlapped with compute."""
    waiting: float = 0.0
    """Seconds of waiting in the step before the last probe, to which later steps are compared."""
    change: float = 0.0
    """The fraction of a step by which waiting must differ to count as changed."""
    latency: float = 0.0
    rate: float = 0.0
    """The link's rate when it was last probed; 0: never."""
    before: int | None = None
    """The rung before this one."""
    favourite: int | None = None
    """The rung that the last probe was for."""
    has_changed: bool = False
    """True if the last step's waiting differed from the reference step's."""

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        state = dataclasses.asdict(self)
        for rung in state["rungs"]:
            rung["steps"] = [tuple(one) for one in rung["steps"]]  # torch.load accepts no NamedTuple by default
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], rungs: int) -> Memory:
        """Read the result of `as_dict` for a ladder of `rungs`; raise `CheckpointError` for anything else."""
        try:
            read = [Rung(**rung | {"sends": tuple(map(tuple, rung["sends"]))}) for rung in state["rungs"]]
            for rung in read:
                rung.steps = [OnLink(*one) for one in rung.steps]
            memory = cls(**{**state, "rungs": read, "recent": [tuple(one) for one in state["recent"]]})
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"Adaptive: the state is damaged ({type(error).__name__}: {error}).") from error
        if len(read) != rungs:
            raise CheckpointError(f"Adaptive: the state is of {len(read)} rungs; this ladder has {rungs}.")
        faults = list(_faults_of(memory))
        if faults:
            more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
            raise CheckpointError(f"Adaptive: the state is damaged. {'; '.join(faults[:8])}{more}.")
        return memory


def _faults_of(memory: Any) -> Iterator[str]:
    """Yield what is wrong in each entry of a `Memory` that could not have been measured or decided."""
    last = len(memory.rungs) - 1
    yield from _unless_whole("rung", memory.rung, most=last)
    for name in ("before", "favourite"):
        if getattr(memory, name) is not None:
            yield from _unless_whole(name, getattr(memory, name), most=last)
    for name in ("judged", "since_move", "since_probe"):
        yield from _unless_whole(name, getattr(memory, name))
    for name in ("hidden", "waiting", "change", "latency", "rate"):
        yield from _unless_finite(name, getattr(memory, name))
    if type(memory.has_changed) is not bool:
        yield f"has_changed: expected True or False, got {memory.has_changed!r}"
    for number, seen in enumerate(memory.recent):
        if len(seen) != 3:
            yield f"recent[{number}]: expected (seconds, waiting, exposed), got {seen!r}"
        for name, value in zip(("seconds", "waiting", "exposed"), seen, strict=False):
            yield from _unless_finite(f"recent[{number}].{name}", value)
    for number, rung in enumerate(memory.rungs):
        yield from _faults_of_rung(f"rungs[{number}]", rung)


def _faults_of_rung(where: str, rung: Any) -> Iterator[str]:
    yield from _unless_whole(f"{where}.banned_until", rung.banned_until)
    yield from _unless_whole(f"{where}.ban", rung.ban)
    for number, sent in enumerate(rung.sends):
        if len(sent) != 3 or sent[0] not in KINDS:
            yield f"{where}.sends[{number}]: expected (kind of collective, bytes, number), got {sent!r}"
            continue
        yield from _unless_whole(f"{where}.sends[{number}].bytes", sent[1])
        yield from _unless_whole(f"{where}.sends[{number}].number", sent[2], least=1)
    for number, step in enumerate(rung.steps):
        for name, value in step._asdict().items():
            yield from _unless_finite(f"{where}.steps[{number}].{name}", value)


def _unless_whole(name: str, value: object, *, least: int = 0, most: int = _MOST_WHOLE) -> Iterator[str]:
    if type(value) is not int or not least <= value <= most:
        limits = f"from {least} to {most}" if most != _MOST_WHOLE else f"of at least {least}"
        yield f"{name}: expected a whole number {limits}, got {value!r}"


def _unless_finite(name: str, value: object) -> Iterator[str]:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]  # 'and "object"'
        yield f"{name}: expected a finite number of at least 0, got {value!r}"
