"""The smallest `every` with which DiLoCo reaches a wanted utilisation over a probed network, by compressor.

A round is predicted from a profile: the step without communication, and each compressor's work and messages for a
step's gradients, which have the parameters' shapes. A profile lacks the differences that DiLoCo writes at a turn, and
its outer optimizer: a few passes over the parameters in each round, which are left out.
"""

from __future__ import annotations

import dataclasses

from .candidates import NOOP
from .link import Network, Transfer
from .predicting import step_of
from .probes import REACH, Probe
from .profiles import HookProfile, Profile
from .seldom import Rounds, round_time
from .step_time import StepTime

MOST_STEPS = 500
"""The longest rounds considered, those of DiLoCo's paper."""
FRAGMENTS, DELAY = 3, 5
"""The settings with which Streaming DiLoCo is predicted. DiLoCo itself sends everything at once and waits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeldomChoice:
    """DiLoCo with a compressor, and the shortest rounds with which its ranks compute as much of the time as wanted."""

    compressor: str
    """The compressor in text form: 'powersgd:rank=4'."""
    rounds: Rounds
    """The shortest rounds that suffice; rounds of `MOST_STEPS` steps if none do."""
    is_enough: bool
    """True if the wanted utilisation is reached."""
    utilisation: float
    """The fraction of a round that the same steps take without communication."""
    bytes_per_step: float
    """Bytes sent per rank and step, averaged over the steps of a round and over ranks."""

    @property
    def code(self) -> str:
        """The line that makes it."""
        given = [f"every={self.rounds.every}", f'compressor="{self.compressor}"']
        if self.rounds.fragments > 1:
            given += [f"fragments={self.rounds.fragments}", f"delay={self.rounds.delay}"]
        return f"commhooks.DiLoCo(model, optimizer, {', '.join(given)})"


def seldom_choices(profile: Profile, probe: Probe, network: Network, wanted: float) -> tuple[SeldomChoice, ...]:
    """Return DiLoCo and Streaming DiLoCo with each compressor of a profile, shortest rounds first.

    If rounds are equally long, DiLoCo comes before Streaming DiLoCo, whose means are some steps old. Each compressor
    appears once, whatever policies it was profiled with: DiLoCo sends one fragment at a time.

    Args:
        profile: The profile of a step under each compressor.
        probe: Limits the size of messages that can be predicted; larger ones are treated as several, one after another.
        network: The network between the ranks: the probe, or one with its times.
        wanted: The utilisation to reach, in (0, 1).

    """
    own: dict[str, HookProfile] = {}
    for label, hook in profile.hooks.items():
        if label != NOOP and (hook.hook not in own or hook.policy == "fifo"):
            own[hook.hook] = hook
    pieces = _InPieces(probe, network)
    found = [
        _shortest(profile, hook, pieces, wanted, *schedule)
        for hook in own.values()
        for schedule in ((1, 0), (FRAGMENTS, DELAY))
    ]
    return tuple(
        sorted(found, key=lambda one: (not one.is_enough, one.rounds.every, one.rounds.fragments, -one.utilisation))
    )


class _InPieces:
    """A network on which a message that is too large to be predicted is several equal ones, one after another.

    That takes a little too long, by the latency of all but the first.
    """

    def __init__(self, probe: Probe, network: Network) -> None:
        self._probe, self._network = probe, network

    def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
        """Return the time and bytes of the pieces together."""
        pieces = max(1, -(-payload // (REACH * self._probe.costs[kind].largest)))
        one = self._network.transfer(kind, -(-payload // pieces), ranks)
        return Transfer(pieces * one.seconds, pieces * one.processor_seconds, pieces * one.bytes_sent, one.afterwards)


def _shortest(
    profile: Profile, hook: HookProfile, network: Network, wanted: float, fragments: int, delay: int
) -> SeldomChoice:
    """Return the shortest rounds that reach the wanted utilisation, or the longest ones."""
    exchange = step_of(profile, hook, hook.buckets).buckets
    step = profile.noop.seconds.median

    def at(every: int) -> tuple[Rounds, StepTime]:
        rounds = Rounds(every=every, fragments=fragments, delay=delay)
        return rounds, round_time(rounds, exchange, step, network, profile.ranks, cores=profile.cores)

    low, high = max(fragments, delay + 1), MOST_STEPS
    while low < high:  # longer rounds compute more of the time
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle)[1].utilisation >= wanted else (middle + 1, high)
    rounds, time = at(low)
    return SeldomChoice(
        compressor=hook.hook,
        rounds=rounds,
        is_enough=time.utilisation >= wanted,
        utilisation=time.utilisation,
        bytes_per_step=time.bytes_sent / rounds.every,
    )
