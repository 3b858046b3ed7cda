"""The prediction of a step's time from a profile and a network: `predict`.

The profile has real steps under every hook, in which nothing was sent, or steps computed from tables. The step-time
model adds the network:

    predicted = without a link, of the profile + (modelled with the network - modelled without a link)

Compute, compression, hand-offs between threads and all other costs of a hook are therefore the profile's; only the wait
for transfers, and their CPU time, come from the model. No step is predicted to be shorter than without communication.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from commhooks.communicators.collective import ring_bytes
from commhooks.experiments.planning.candidates import ALL_REDUCE, NOOP
from commhooks.experiments.planning.errors import ProfileError
from commhooks.experiments.planning.probes import REACH, Probe
from commhooks.experiments.planning.profiles import BucketProfile, HookProfile, Profile, StepParts
from commhooks.experiments.planning.sharded import sharded_step_of
from commhooks.experiments.timing.link import Link, Network, NoLink, Transfer
from commhooks.experiments.timing.rounds import Rounds, round_time
from commhooks.experiments.timing.step_time import Bucket, Stage, Step, StepTime, step_time

TABLES_SPREAD = 0.07
"""The error of steps computed from tables: the root of the mean square over 28 real steps (docs/guide/plan.md)."""
CHECKED_RATES = 10e6, 3e9
"""Bits per second between which predictions were compared with real steps."""
_KNOWN = 0.93  # a median of n values is known to about this times their quartile range over √n: 1.25 · 0.74
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step, over a network."""

    seconds: float
    """Seconds of the whole step; of DiLoCo, of a round divided by its steps."""
    uncertainty: float
    """Seconds in either direction: one standard deviation, roughly."""
    added: float
    """Seconds that the network adds."""
    time: StepTime
    """The step's seconds by kind; time that the model does not explain counts as compression."""
    noise: float
    """The part of the uncertainty, in seconds, that other hooks' predictions do not share."""
    doubt: float
    """The uncertainty of what the network adds, relative to it."""

    def deviation_beside(self, other: Prediction) -> float:
        """Return the relative uncertainty of the ratio of two hooks' steps: one standard deviation.

        An error of the network's model affects both alike, as far as it is as large a part of both.
        """
        network = max(self.doubt, other.doubt) * abs(self.added / self.seconds - other.added / other.seconds)
        return math.hypot(self.noise / self.seconds, other.noise / other.seconds, network)


def predict(
    profile: Profile, network: Network, hook: str = ALL_REDUCE, *, rounds: Rounds | None = None, sharded: bool = False
) -> Prediction:
    """Return the time of a step under a hook of a profile, over a network.

    Args:
        profile: Measured by `profile`, or made of tables.
        network: A `Probe` of as many ranks as the profile's, or a `Link`.
        hook: A label in the profile. With `sharded`, NOOP stands for plain FSDP2.
        rounds: If given, the hook's compressor averages the ranks' models after these rounds, as DiLoCo does, and the
            step is an average one. The outer optimizer's time is not counted.
        sharded: Whether FSDP2 shards the model.

    Raises:
        ProfileError: The profile contradicts itself.
        ProbeError: The hook sends a message that is far larger than those of the probe.

    """
    own, noop = profile.hooks[hook], profile.noop.seconds.median
    noise, doubt = _noise(profile, own), _doubt(profile, own, network)
    if sharded:
        link = probed_link(network) if isinstance(network, Probe) else network
        time = step_time(sharded_step_of(profile, None if hook == NOOP else own), link, profile.ranks)
        noise, added = max(noise, TABLES_SPREAD * time.seconds), time.seconds - noop
    elif rounds is not None:
        exchange = step_of(profile, own, own.buckets).buckets
        pieces = _InPieces(network) if isinstance(network, Probe) else network
        whole = round_time(rounds, exchange, noop, pieces, profile.ranks, cores=profile.cores)
        time = whole.divided(rounds.every)
        added = time.seconds - noop
    else:
        time = _every_step(profile, own, network)
        added = time.seconds - own.step.seconds.median
    return Prediction(time.seconds, math.hypot(noise, doubt * max(0.0, added)), added, time, noise, doubt)


def payloads_of(profile: Profile, *hooks: HookProfile) -> dict[str, int]:
    """Return the largest payload of each kind in a step under these hooks; a fused round is one payload, as sent."""
    noting = _Noting()
    for hook in hooks:
        step_time(step_of(profile, hook, hook.buckets), noting, profile.ranks)
    return noting.largest


def step_of(profile: Profile, hook: HookProfile, buckets: Sequence[BucketProfile]) -> Step:
    """Return a step for the step-time model.

    Buckets become ready when their last gradient does without communication: with one core, under a hook that moment
    holds the compression of earlier buckets too.
    """
    ready = {gradient.name: gradient.ready for gradient in profile.gradients}
    noop = profile.noop
    compute = noop.forward + noop.backward
    found = []
    latest = 0.0
    for bucket in buckets:
        moments = [ready[name] for name in bucket.parameters if name in ready]
        latest = min(compute, max(latest, *moments) if moments else latest)
        stages = tuple(Stage(one.seconds, one.sends) for one in bucket.rounds)
        found.append(Bucket(latest, stages, bucket.after))
    return Step(
        compute=compute,
        optimizer=noop.exposed + noop.optimizer,
        buckets=tuple(found),
        policy=hook.policy,
        cores=profile.cores,
    )


def unmodelled(profile: Profile, hook: HookProfile) -> float:
    """Return the seconds of a hook's step that the step-time model does not know of, such as thread hand-offs."""
    step = step_of(profile, hook, hook.buckets)
    return hook.step.seconds.median - step_time(step, NoLink(), profile.ranks).seconds


def step_over(step: Step, network: Network, ranks: int, *, more: float = 0.0, least: float = 0.0) -> StepTime:
    """Return a step's time over a network; `more` seconds that the model does not explain count as compression.

    No step takes less than `least` seconds. Raises `ProfileError` if it would take none.
    """
    modelled = step_time(step, network, ranks)
    seconds = modelled.seconds + more
    if not seconds > 0:
        raise ProfileError(f"the profile contradicts itself: a step would take {seconds:g} s; profile again.")
    seconds = max(least, seconds)
    compression = max(0.0, modelled.compression + seconds - modelled.seconds)
    waiting = max(0.0, seconds - modelled.compute - compression)
    return dataclasses.replace(modelled, seconds=seconds, compression=compression, waiting=waiting)


def probed_link(probe: Probe) -> Link:
    """Return a link of the rate and latency that were measured, for collectives or ranks that were not."""
    cost = probe.costs["all-reduce"]
    sent = ring_bytes("all-reduce", _MIB, probe.ranks) / _MIB
    a_byte = cost.line.per_byte / sent
    return Link(
        rate=8 / a_byte if a_byte > 0 else math.inf,
        latency=cost.line.at_zero / (2 * (probe.ranks - 1)),
        seconds_per_byte=cost.processor_line.per_byte / sent,
    )


class _Noting(NoLink):
    """A network that notes the largest payload of each kind."""

    def __init__(self) -> None:
        self.largest: dict[str, int] = {}

    def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
        """Note the payload."""
        self.largest[kind] = max(payload, self.largest.get(kind, 0))
        return super().transfer(kind, payload, ranks)


class _InPieces:
    """A probed network on which a message that is too large to be predicted is several equal ones, one after another.

    That takes a little too long, by the latency of all but the first.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self.link, self.spread = probe.link, probe.spread

    def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
        """Return the time and bytes of the pieces together."""
        pieces = max(1, -(-payload // (REACH * self._probe.costs[kind].largest)))
        one = self._probe.transfer(kind, -(-payload // pieces), ranks)
        return Transfer(pieces * one.seconds, pieces * one.processor_seconds, pieces * one.bytes_sent, one.afterwards)


def _every_step(profile: Profile, hook: HookProfile, network: Network) -> StepTime:
    """Return the time of a step in which gradients are averaged."""
    step, least = step_of(profile, hook, hook.buckets), profile.noop.seconds.median
    return step_over(step, network, profile.ranks, more=unmodelled(profile, hook), least=least)


def _noise(profile: Profile, hook: HookProfile) -> float:
    """Return the uncertainty, in seconds, of a step without a link.

    Besides the noise of the steps it has the amount by which steps with noop were slower than steps with another hook,
    which noise within a series does not explain.
    """
    if hook.step.steps == 0:
        return TABLES_SPREAD * hook.step.seconds.median
    fastest = min(one.step.seconds.median for one in profile.hooks.values())
    return math.hypot(_of_median(hook.step), profile.noop.seconds.median - fastest)


def _of_median(step: StepParts) -> float:
    """Return the statistical uncertainty of the median of the steps, in seconds."""
    return _KNOWN * (step.seconds.high - step.seconds.low) / math.sqrt(step.steps)


def _doubt(profile: Profile, hook: HookProfile, network: Network) -> float:
    """Return the uncertainty of what the network adds, relative to it.

    If the profile's plain all-reduce was measured over this network, the error of its prediction is part of it.
    """
    kinds = {kind for bucket in hook.buckets for one in bucket.rounds for kind, _ in one.sends}
    spread = max(map(network.spread, kinds), default=0.0)
    if not was_measured_over(profile, network):
        return spread
    dense, plain = profile.hooks[ALL_REDUCE], profile.plain.seconds.median
    time = _every_step(profile, dense, network)
    most = max(time.seconds - dense.step.seconds.median, plain - dense.step.seconds.median)
    return math.hypot(spread, abs(time.seconds - plain) / most if most > 0 else 0.0)


def was_measured_over(profile: Profile, network: Network) -> bool:
    """Return whether the profile's plain all-reduce ran over this network."""
    return (
        profile.plain.steps > 0 and profile.link == network.link and (bool(profile.link) or isinstance(network, Probe))
    )
