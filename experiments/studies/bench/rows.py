"""The figures of a benchmark: ratios to a peer, their spread, and their targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from commhooks.experiments.results.summary import Spread

RATIO = "ratio"
OURS, THEIRS, AGAIN = "ours", "theirs", "again"  # contenders: the peer has two turns in each round
MET, WITHIN, MISSED = "met", "within the spread", "missed"

Seconds = dict[str, list[float]]
"""The seconds of each round's turn, by contender."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of the suite. Lower is better, whatever it counts."""

    name: str  # what was measured, and where: "transformer, default"
    quantity: str  # "step time", "peak memory"
    spread: Spread  # the median over rounds, and the quartiles
    unit: str = RATIO
    noise: Spread | None = None  # the peer against itself in the same rounds; None: nothing comparable
    target: float | None = None  # None: not aimed at, only watched
    slack: float = 0.0  # how far a median above the target still counts as within the spread
    absolute: str = ""  # what the ratio was made of, such as '72.1 ms of 102 ms'; never compared
    note: str = ""  # why it is so, or what is different here

    @property
    def key(self) -> str:
        """The text that identifies the row within its section."""
        return f"{self.name}: {self.quantity}"

    @property
    def verdict(self) -> str:
        """The verdict: the median meets the target, exceeds it by at most the slack, or misses it; "": no target."""
        if self.target is None:
            return ""
        if self.spread.median <= self.target:
            return MET
        return WITHIN if self.spread.median <= self.target + self.slack else MISSED


def ratios(ours: Sequence[float], *theirs: Sequence[float]) -> Spread:
    """Return ours over the mean of theirs, round by round."""
    return Spread.of([mine / statistics.fmean(others) for mine, *others in zip(ours, *theirs, strict=True)])


def pooled(launches: Sequence[Seconds]) -> Seconds:
    """Return the rounds of all launches: processes differ in where their memory lies, which no further round shows."""
    return {name: [taken for launch in launches for taken in launch[name]] for name in launches[0]}


def slack_of(noise: Spread) -> float:
    """Return how far the ratio of a peer to itself may be from 1 by chance: as far as the farther of its quartiles."""
    return max(noise.high - 1, 1 - noise.low, 0.0)


def compared(taken: Mapping[str, Sequence[float]]) -> tuple[Spread, Spread]:
    """Return ours over both turns of the peer, and the peer's second turn over its first, round by round."""
    return ratios(taken[OURS], taken[THEIRS], taken[AGAIN]), ratios(taken[AGAIN], taken[THEIRS])


def beside(
    peer: str,
    name: str,
    quantity: str,
    taken: Mapping[str, Sequence[float]],
    form: Callable[[float], str],
    *,
    target: float | None = None,
    allows_spread: bool = False,
) -> Row:
    """Return ours over the peer's, with what both took in words, and the peer's name before the second."""
    spread, noise = compared(taken)
    ours, theirs = (form(statistics.median(taken[who])) for who in (OURS, THEIRS))
    return Row(
        name=name,
        quantity=quantity,
        spread=spread,
        noise=noise,
        target=target,
        slack=slack_of(noise) if allows_spread else 0.0,
        absolute=f"{ours}, {peer} {theirs}",
    )
