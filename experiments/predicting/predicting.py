"""Prediction of a step's time from a profile and a network.

The profile has real steps under every hook, in which nothing was sent. The step-time model adds the network:

    predicted = measured without a link + (modelled with the network - modelled without a link)

Compute, compression, hand-offs between threads and all other costs of a hook are therefore measured; only the wait for
transfers, and their CPU time, come from the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from commhooks.communicators.collective import ring_bytes
from commhooks.language.compressor import Compressor
from commhooks.making import compressor_in_file

from .errors import ProfileError
from .link import Link, Network, Transfer, plain_kind
from .probes import Probe
from .profiles import BucketProfile, GradientProfile, HookProfile, Profile, RoundProfile
from .sizes import MIB
from .solvers import optimize
from .step_time import Bucket, Stage, Step, StepTime, step_time

_SLOWEST, _FASTEST = 1e4, 1e14  # bits per second, between which a rate is looked for


class NoLink:
    """A network on which collectives take no time."""

    def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
        """Return no time at all."""
        return Transfer(0.0, 0.0, ring_bytes(plain_kind(kind), payload, ranks))


class Effortless:
    """A network that takes another one's time and nothing of the processor, as if a network card did all of it."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
        """Return the time of the network's transfer."""
        return self._network.transfer(kind, payload, ranks)._replace(processor_seconds=0.0, afterwards=0.0)


class _Noting(NoLink):
    """A network that notes the largest payload of each kind."""

    def __init__(self) -> None:
        self.largest: dict[str, int] = {}

    def transfer(self, kind: str, payload: int, ranks: int) -> Transfer:
        """Note the payload."""
        self.largest[kind] = max(payload, self.largest.get(kind, 0))
        return super().transfer(kind, payload, ranks)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step under a hook, over a network."""

    seconds: float
    """Seconds of the whole step."""
    added: float
    """Seconds added to the step that was measured without a link."""
    modelled: StepTime
    """The step-time model's own answer."""

    @property
    def time(self) -> StepTime:
        """The step's seconds by kind; time that the model does not explain counts as compression."""
        unknown = self.seconds - self.modelled.seconds
        compression = max(0.0, self.modelled.compression + unknown)
        waiting = max(0.0, self.seconds - self.modelled.compute - compression)
        return dataclasses.replace(self.modelled, seconds=self.seconds, compression=compression, waiting=waiting)


@dataclasses.dataclass(frozen=True)
class Unlinked:
    """A step under a hook without a link, from which follows that over any network."""

    step: Step
    ranks: int
    unknown: float = 0.0
    """Seconds of the measured step that the step-time model does not know of, such as hand-offs between threads."""
    measured: float = 0.0
    """Seconds of the step that was measured."""

    @classmethod
    def of(
        cls,
        profile: Profile,
        hook: HookProfile,
        *,
        cap_mb: float | None = None,
        cores: int | None = None,
        slower: float = 1.0,
    ) -> Unlinked:
        """Return the step of a profile's hook.

        Args:
            profile: In which the hook was measured.
            hook: One of its hooks.
            cap_mb: A bucket size in MiB; None: the buckets of the profile.
            cores: Of each rank; None: as in the profile.
            slower: How many times as long compute and compression take as in the profile.

        """
        measured = step_of(profile, hook, hook.buckets)
        asked = measured if cap_mb is None else step_of(profile, hook, recut(profile.gradients, hook.buckets, cap_mb))
        unknown = hook.step.seconds.median - step_time(measured, NoLink(), profile.ranks).seconds
        asked = dataclasses.replace(asked, cores=cores or asked.cores).scaled(slower)
        return cls(asked, profile.ranks, slower * unknown, hook.step.seconds.median)

    def over(self, network: Network) -> Prediction:
        """Return the time of the step over a network; raise `ProfileError` if it would take none."""
        modelled = step_time(self.step, network, self.ranks)
        seconds = modelled.seconds + self.unknown
        if not seconds > 0:
            raise ProfileError(f"the profile contradicts itself: a step would take {seconds:g} s; profile again.")
        return Prediction(seconds, seconds - self.measured, modelled)


def predict(profile: Profile, hook: HookProfile, network: Network, cap_mb: float | None = None) -> Prediction:
    """Return the time of a step under a hook, with the buckets of the profile or with a bucket size of its own."""
    return Unlinked.of(profile, hook, cap_mb=cap_mb).over(network)


def payloads_of(profile: Profile, *hooks: HookProfile, cap_mb: float | None = None) -> dict[str, int]:
    """Return the largest payload of each kind in a step under these hooks, with the profile's buckets or another cap.

    A fused round is one payload, as it is sent.
    """
    noting = _Noting()
    for hook in hooks:
        buckets = hook.buckets if cap_mb is None else recut(profile.gradients, hook.buckets, cap_mb)
        step_time(step_of(profile, hook, buckets), noting, profile.ranks)
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


def recut(
    gradients: Sequence[GradientProfile], buckets: Sequence[BucketProfile], cap_mb: float
) -> tuple[BucketProfile, ...]:
    """Return the buckets that a DDP would make with this bucket size, in MiB.

    Gradients are taken in the order in which they become ready; a bucket closes when it has reached its limit.
    Compression and payloads are divided in proportion to bytes.
    """
    groups: list[list[GradientProfile]] = [[]]
    for gradient in gradients:
        if sum(one.bytes for one in groups[-1]) >= int(cap_mb * MIB):
            groups.append([])
        groups[-1].append(gradient)
    pattern = max(buckets, key=lambda bucket: (len(bucket.rounds), bucket.bytes))
    return tuple(_share(group, pattern, buckets) for group in groups if group)


def _share(group: Sequence[GradientProfile], pattern: BucketProfile, buckets: Sequence[BucketProfile]) -> BucketProfile:
    """Return a bucket of these gradients, with its share of what all measured buckets cost."""
    size = sum(gradient.bytes for gradient in group)
    share = size / sum(bucket.bytes for bucket in buckets)
    rounds = []
    for number, round_ in enumerate(pattern.rounds):
        alike = [bucket.rounds[number] for bucket in buckets if number < len(bucket.rounds)]
        sends = []
        for place, (kind, _) in enumerate(round_.sends):
            payload = sum(one.sends[place][1] for one in alike if place < len(one.sends))
            sends.append((kind, max(1, round(share * payload))))
        rounds.append(RoundProfile(share * sum(one.seconds for one in alike), tuple(sends)))
    return BucketProfile(
        tuple(gradient.name for gradient in group),
        size,
        max(gradient.ready for gradient in group),
        tuple(rounds),
        share * sum(bucket.after for bucket in buckets),
    )


def link_like(probe: Probe, rate: float, *, is_effortless: bool = False) -> Link:
    """Return a link of another rate, in bits per second, with the latency that was measured.

    It takes what was measured of the processor too, or nothing if it `is_effortless`.
    """
    cost = probe.costs["all-reduce"]
    hops = 2 * (probe.ranks - 1)
    sent = ring_bytes("all-reduce", MIB, probe.ranks) / MIB
    a_byte = 0.0 if is_effortless else cost.processor_line.per_byte / sent
    return Link(rate=rate, latency=cost.line.at_zero / hops, seconds_per_byte=a_byte)


def probed_link(probe: Probe, *, is_effortless: bool = False) -> Link:
    """Return a link of the rate and latency that were measured, for collectives that were not."""
    sent = ring_bytes("all-reduce", MIB, probe.ranks) / MIB
    a_byte = probe.costs["all-reduce"].line.per_byte / sent
    return link_like(probe, 8 / a_byte if a_byte > 0 else math.inf, is_effortless=is_effortless)


def utilisation(profile: Profile, seconds: float) -> float:
    """Return the fraction of a step of this many seconds that it takes without communication."""
    return profile.noop.seconds.median / seconds


def rate_for(
    profile: Profile,
    hook: HookProfile,
    probe: Probe,
    wanted: float,
    *,
    is_effortless: bool = False,
) -> float | None:
    """Return the rate, in bits per second, at which a hook reaches a utilisation; 10 kbit/s if it always does.

    Returns None if no rate is high enough: what the hook computes, or latency, takes too long by itself.
    """
    unlinked = Unlinked.of(profile, hook)

    def surplus(log_rate: float) -> float:
        link = link_like(probe, math.exp(log_rate), is_effortless=is_effortless)
        return utilisation(profile, unlinked.over(link).seconds) - wanted

    low, high = math.log(_SLOWEST), math.log(_FASTEST)
    if surplus(high) < 0:
        return None
    return _SLOWEST if surplus(low) >= 0 else math.exp(optimize().brentq(surplus, low, high, xtol=1e-9))


def compressor_of(hook: HookProfile) -> Compressor:
    """Return a fresh compressor of a profiled hook."""
    return compressor_in_file(hook.hook)
