"""How seldom ranks must communicate over a probed network to compute most of the time: DiLoCo's `every`, by compressor.

A round is predicted from what a profile has: the step without communication, and each compressor's work and messages.
They are those of a step's gradients, which have the parameters' shapes. Not in a profile, and so left out, are the
differences that DiLoCo writes at a turn and its outer optimizer: a few passes over the parameters in each round.
"""

from __future__ import annotations

import dataclasses

from commhooks.communicators.links import Network, Transfer
from commhooks.planning.candidates import NOOP
from commhooks.planning.predicting import step_of
from commhooks.planning.probe import REACH, Probe
from commhooks.planning.profile import HookProfile, Profile
from commhooks.planning.seldom import Rounds, round_time
from commhooks.planning.step_time import StepTime

MOST_STEPS = 500
"""The longest rounds that are considered: those of DiLoCo's paper."""
FRAGMENTS, DELAY = 3, 5
"""What Streaming DiLoCo is predicted with, besides DiLoCo itself, which sends everything at once and waits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeldomChoice:
    """DiLoCo with a compressor, and the shortest rounds with which its ranks compute as much of the time as wanted."""

    compressor: str
    """As it is written: 'powersgd:rank=4'."""
    rounds: Rounds
    """Those rounds; of `MOST_STEPS` steps if none is long enough."""
    is_enough: bool
    """Whether the wanted utilisation is reached."""
    utilisation: float
    """The part of a round in which a rank does what it does without communication."""
    bytes_per_step: float
    """Sent, per rank, on average over the steps of a round and over the ranks."""

    @property
    def code(self) -> str:
        """The line that makes it."""
        given = [f"every={self.rounds.every}", f'compressor="{self.compressor}"']
        if self.rounds.fragments > 1:
            given += [f"fragments={self.rounds.fragments}", f"delay={self.rounds.delay}"]
        return f"commhooks.DiLoCo(model, optimizer, {', '.join(given)})"


def seldom_choices(profile: Profile, probe: Probe, network: Network, wanted: float) -> tuple[SeldomChoice, ...]:
    """Return DiLoCo and Streaming DiLoCo with each compressor of a profile, those of the shortest rounds first.

    With equally long rounds DiLoCo comes before Streaming DiLoCo, which uses means that are some steps old. Each
    compressor counts once, whatever policies it was profiled with: DiLoCo sends a fragment at a time.

    Args:
        profile: Of a step under each compressor.
        probe: Says how large messages can be predicted: larger ones are taken as several, one after another.
        network: Between the ranks; the probe, or one with its times.
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
