"""Predict every hook's step over a network that was probed, and recommend one, or say that none pays: `plan`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torch.nn import Module

from commhooks.errors import SettingsError
from commhooks.units import seconds_in_words
from commhooks.unwrapping import find_ddp, trained_parameters

from .candidates import ALL_REDUCE, NOOP
from .errors import ProbeError
from .every import SeldomChoice, seldom_choices
from .ladder import MOST_SECONDS, seconds_to_reach
from .link import Network
from .predicting import (
    Effortless,
    Prediction,
    link_like,
    payloads_of,
    predict,
    probed_link,
    rate_for,
    utilisation,
)
from .probes import REACH, Probe
from .profiles import HookProfile, Profile, StepParts
from .profiling import fingerprint_of
from .sharded_profile import ShardedChoice, sharded_choices

LEAST_GAIN = 0.03
"""A hook that saves less of a step than this does not pay: it is lost in the variation between runs."""
MOST_CONTRADICTION = 0.3
"""The error of the plain all-reduce's prediction, relative to its measured step, beyond which nothing is recommended:
the probe and the profile do not describe the same network."""
BUCKET_CAPS_MB = (0.5, 1.0, 2.0, 5.0, 10.0, 25.0)
_KNOWN = 0.93  # a median of n values is known to about this times their quartile range over √n: 1.25 · 0.74


@dataclasses.dataclass(frozen=True)
class Choice:
    """A hook with a policy and a bucket size, and what a step under it is predicted to take."""

    label: str
    """The hook's name with settings and policy."""
    seconds: float
    uncertainty: float
    """Seconds in either direction: one standard deviation, roughly."""
    speed_up: float
    """The speed-up over the all-reduce, with the profile's bucket size."""
    utilisation: float
    """The fraction of the step that a rank needs without communication."""
    bytes_sent: int
    """Bytes sent per step and rank, averaged over ranks."""
    waiting: float
    """Seconds in which nothing is computed and nothing is compressed."""
    state_bytes: int
    code: str
    """The line that attaches it; empty: nothing is to be attached."""
    bucket_cap_mb: float | None = None
    """The DDP's bucket size, in MiB; None: the profile's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Every hook's step over one network."""

    choices: tuple[Choice, ...]
    """All hooks but "noop", with the profile's bucket size, fastest first."""
    other_buckets: tuple[Choice, ...]
    """The recommended hook, or the all-reduce if none pays, with other bucket sizes."""
    recommended: Choice
    """The hook to use: the all-reduce if none pays."""
    pays: bool
    """True if compression pays."""
    reason: str
    """The recommendation's reason, in a sentence."""
    bound: float
    """The largest possible speed-up: the step under all-reduce over the step without communication."""
    rates: tuple[tuple[str, float | None], ...]
    """Each hook with the rate, in bits per second, at which it reaches `wanted_utilisation`; None: it never does."""
    wanted_utilisation: float
    plain_error: float
    """Predicted over measured step of the plain all-reduce, minus 1."""
    backend: str = "gloo"
    """The transport of messages: the probe's backend, or "none"."""
    seconds_per_byte: float = 0.0
    """CPU seconds for each byte that a rank sends in an all-reduce."""
    seldom: tuple[SeldomChoice, ...] = ()
    """DiLoCo with each compressor, in the shortest rounds that reach `wanted_utilisation`; the shortest first. It
    trains differently from hooks of every step, so it is never recommended here: compare the loss."""
    sharded: tuple[ShardedChoice, ...] = ()
    """Plain FSDP2, and each compressor that can return shards, fastest first; empty unless asked for."""

    @property
    def dense(self) -> Choice:
        """The all-reduce."""
        return next(choice for choice in self.choices if choice.label == ALL_REDUCE)


def plan(
    profile: Profile,
    probe: Probe,
    *,
    model: Module | None = None,
    wanted_utilisation: float = 0.9,
    bucket_caps_mb: Sequence[float] = BUCKET_CAPS_MB,
    backend: str | None = None,
    sharded: bool = False,
) -> Plan:
    """Predict the step time of every hook in a profile, over the network of a probe, and recommend one.

    Args:
        profile: The model's profile, measured on the probe's hosts and link.
        probe: The network's probe. Its largest messages must have at least a fourth of the size of the largest that the
            profile's hooks send.
        model: If given, the profile must be of this model.
        wanted_utilisation: The utilisation for which rates and DiLoCo's rounds are computed.
        bucket_caps_mb: Bucket sizes to consider besides the profile's, in MiB; sizes with messages larger than the
            probe can predict are left out.
        backend: None: the probe's, which its times include. "none": transfers take the probed time and no CPU time, as
            if a network card did all of it.
        sharded: If True, predict steps of FSDP2 too. Profiles have no such steps and probes no such collectives: their
            time follows from the rate and latency of the probe's all-reduce.

    Raises:
        SettingsError: The profile belongs to another model, or to other ranks, hosts or another link than the probe; or
            an argument is invalid.
        ProbeError: The probe's messages were too small to predict a hook's; the message says how long to probe.

    """
    _check(profile, probe, model, wanted_utilisation, bucket_caps_mb)
    if backend not in (None, "none", probe.backend):
        raise SettingsError(f"plan(backend={backend!r}): expected {probe.backend!r}, which was probed, or 'none'.")
    is_effortless = backend == "none"
    network: Network = Effortless(probe) if is_effortless else probe
    predictions = {label: predict(profile, hook, network) for label, hook in profile.hooks.items() if label != NOOP}
    doubts = _Doubts(profile, probe, predictions[ALL_REDUCE])
    dense = predictions[ALL_REDUCE]

    def choice(label: str, prediction: Prediction, cap_mb: float | None = None) -> Choice:
        hook = profile.hooks[label]
        return Choice(
            label=label,
            seconds=prediction.seconds,
            uncertainty=doubts.of(hook, prediction),
            speed_up=dense.seconds / prediction.seconds,
            utilisation=utilisation(profile, prediction.seconds),
            bytes_sent=prediction.modelled.bytes_sent,
            waiting=prediction.modelled.waiting,
            state_bytes=hook.state_bytes,
            code="" if label == ALL_REDUCE else code_for(hook),
            bucket_cap_mb=cap_mb,
        )

    choices = sorted((choice(*pair) for pair in predictions.items()), key=lambda one: one.seconds)
    recommended, reason = _recommend(choices, predictions, profile, doubts)
    return Plan(
        choices=tuple(choices),
        other_buckets=tuple(
            choice(recommended.label, predict(profile, profile.hooks[recommended.label], network, cap), cap)
            for cap in bucket_caps_mb
            if probe.reaches(payloads_of(profile, profile.hooks[recommended.label], cap_mb=cap))
        ),
        recommended=recommended,
        pays=recommended.label != ALL_REDUCE,
        reason=reason,
        bound=dense.seconds / profile.noop.seconds.median,
        rates=tuple(
            (one.label, rate_for(profile, hook, probe, wanted_utilisation, is_effortless=is_effortless))
            for one, hook in ((one, profile.hooks[one.label]) for one in choices)
        ),
        wanted_utilisation=wanted_utilisation,
        plain_error=dense.seconds / profile.plain.seconds.median - 1,
        backend=backend or probe.backend,
        seconds_per_byte=link_like(probe, math.inf, is_effortless=is_effortless).seconds_per_byte,
        seldom=seldom_choices(profile, probe, network, wanted_utilisation),
        sharded=sharded_choices(
            profile, probed_link(probe, is_effortless=is_effortless), overlaps=(backend or probe.backend) != "gloo"
        )
        if sharded
        else (),
    )


def code_for(hook: HookProfile) -> str:
    """Return the line that attaches a hook to a model in its DistributedDataParallel."""
    policy = "" if hook.policy == "fifo" else f', policy="{hook.policy}"'
    return f'commhooks.attach(model, "{hook.hook}"{policy})'


class _Doubts:
    """The uncertainty of predictions.

    Four errors are added as if independent: the noise of the profile's steps; the amount by which steps with noop were
    slower than steps with another hook, which noise within a series does not explain; the spread of the probe, in
    proportion to the time spent on the network; and the relative error of what the network adds to the plain
    all-reduce.
    """

    def __init__(self, profile: Profile, probe: Probe, dense: Prediction) -> None:
        self._probe = probe
        fastest = min(hook.step.seconds.median for hook in profile.hooks.values())
        self._contradiction = profile.noop.seconds.median - fastest
        added = profile.plain.seconds.median - profile.hooks[ALL_REDUCE].step.seconds.median
        missed = abs(dense.seconds - profile.plain.seconds.median)
        self._missed = missed / max(dense.added, added) if max(dense.added, added) > 0 else 0.0

    def of(self, hook: HookProfile, prediction: Prediction) -> float:
        """Return the uncertainty of a prediction, in seconds."""
        network = self.of_network(hook) * max(0.0, prediction.added)
        return math.hypot(_noise(hook.step), self._contradiction, network)

    def of_difference(self, one: HookProfile, other: HookProfile, added: float) -> float:
        """Return the uncertainty, in seconds, of the difference between two hooks' predicted steps.

        The network adds `added` seconds more to one than to the other.

        An error of the network's model affects both alike, as far as it adds as much to both.
        """
        network = max(self.of_network(one), self.of_network(other))
        return math.hypot(_noise(one.step), _noise(other.step), self._contradiction, network * abs(added))

    def of_network(self, hook: HookProfile) -> float:
        """Return the uncertainty of what the network adds, relative to it."""
        kinds = {kind for bucket in hook.buckets for one in bucket.rounds for kind, _ in one.sends}
        spread = max((self._probe.costs[kind].spread() for kind in kinds), default=0.0)
        return math.hypot(spread, self._missed)


def _recommend(
    choices: Sequence[Choice], predictions: dict[str, Prediction], profile: Profile, doubts: _Doubts
) -> tuple[Choice, str]:
    """Return the fastest choice whose gain is certain enough, and why it is the one.

    It must be faster than the all-reduce as predicted, and as measured too: a network on which the all-reduce is
    mispredicted is not the one that was probed.
    """
    dense = next(choice for choice in choices if choice.label == ALL_REDUCE)
    measured = profile.plain.seconds.median
    contradiction = (
        f"the plain all-reduce is predicted to take {seconds_in_words(dense.seconds)} a step and was measured to take "
        f"{seconds_in_words(measured)}. Probe and profile again, one after the other, over the same network and "
        "without other load."
    )
    if abs(dense.seconds / measured - 1) > MOST_CONTRADICTION:
        return dense, f"No hook can be recommended: {contradiction}"
    needed = [
        doubts.of_difference(
            profile.hooks[choice.label],
            profile.hooks[ALL_REDUCE],
            predictions[ALL_REDUCE].added - predictions[choice.label].added,
        )
        for choice in choices
    ]
    for choice, doubt in zip(choices, needed, strict=True):
        gain = dense.seconds - choice.seconds
        if choice is not dense and gain > max(LEAST_GAIN * dense.seconds, doubt):
            if choice.seconds >= measured:
                return dense, f"No hook can be recommended: none beats the all-reduce as measured, and {contradiction}"
            saved = f"{100 * gain / dense.seconds:.0f} % of the all-reduce's step (± {100 * doubt / dense.seconds:.0f})"
            return choice, f"{choice.label} saves {saved}."
    best, doubt = next((pair for pair in zip(choices, needed, strict=True) if pair[0] is not dense), (dense, 0.0))
    gain = 100 * (dense.seconds - best.seconds) / dense.seconds
    if best is dense or gain <= 0:
        return dense, "None pays: the plain all-reduce is predicted to be fastest."
    return dense, (
        f"None pays: the best, {best.label}, would save {gain:.1f} % of a step, which is below "
        f"{100 * LEAST_GAIN:g} % or within the uncertainty of {100 * doubt / dense.seconds:.1f} %."
    )


def _noise(step: StepParts) -> float:
    """Return the statistical uncertainty of the median of the steps, in seconds."""
    return _KNOWN * (step.seconds.high - step.seconds.low) / math.sqrt(step.steps)


def _check(
    profile: Profile, probe: Probe, model: Module | None, wanted_utilisation: float, bucket_caps_mb: Sequence[float]
) -> None:
    if model is not None:
        fingerprint = fingerprint_of(trained_parameters(model, find_ddp("plan", model)))
        if fingerprint != profile.fingerprint:
            raise SettingsError(
                f"plan: the profile is of another model ({profile.model}, fingerprint {profile.fingerprint}; this "
                f"one's is {fingerprint}): its parameters have other names, shapes or dtypes. Profile this model."
            )
    missing = [label for label in (NOOP, ALL_REDUCE) if label not in profile.hooks]
    if missing:
        raise SettingsError(f"plan: the profile lacks hook {missing[0]!r}, with which others are compared.")
    if not 0 < wanted_utilisation < 1:
        raise SettingsError(f"plan(wanted_utilisation={wanted_utilisation!r}): it must be in (0, 1).")
    if not all(0 < cap < math.inf for cap in bucket_caps_mb):
        raise SettingsError(f"plan(bucket_caps_mb={bucket_caps_mb!r}): sizes must be above zero, in MiB.")
    _check_network(profile, probe)


def _check_network(profile: Profile, probe: Probe) -> None:
    """Raise an error unless the probe is of the profile's network, and has what its hooks send."""
    if profile.ranks != probe.ranks:
        raise SettingsError(
            f"plan: the profile is of {profile.ranks} ranks and the probe of {probe.ranks}; measure both with as many "
            "ranks as you train with."
        )
    if profile.link and probe.link and profile.link != probe.link:
        raise SettingsError(
            f"plan: the profile is of link {profile.link!r} and the probe of {probe.link!r}; measure both over the "
            "link that you train over."
        )
    if profile.hosts and probe.hosts and sorted(profile.hosts) != sorted(probe.hosts):
        raise SettingsError(
            f"plan: the profile is of ranks on {_listed(profile.hosts)} and the probe of ranks on "
            f"{_listed(probe.hosts)}; measure both on the hosts that you train on, with as many ranks on each."
        )
    for label, hook in profile.hooks.items():
        payloads = payloads_of(profile, hook)  # raises if the profile contradicts itself
        if unmeasured := payloads.keys() - probe.costs.keys():
            raise SettingsError(
                f"plan: hook {label!r} uses {min(unmeasured)!r}, which the probe did not measure; probe with this "
                "profile (profile=, --profile)."
            )
        if not probe.reaches(payloads):
            raise ProbeError(_too_small(label, payloads, profile, probe))


def _too_small(label: str, payloads: Mapping[str, int], profile: Profile, probe: Probe) -> str:
    """Return why a hook cannot be predicted, and what to do."""
    kind = max(payloads, key=lambda kind: payloads[kind] / probe.costs[kind].largest)
    sent = [hook for name, hook in profile.hooks.items() if name != NOOP]
    seconds = seconds_to_reach(payloads_of(profile, *sent), probe)
    advice = (
        f"probe with this profile (profile=, --profile), for at least {seconds} s (seconds=)"
        if seconds <= MOST_SECONDS
        else f"it would take {seconds:,} s, more than a probe may (at most {MOST_SECONDS:g}), so use smaller buckets "
        "(bucket_cap_mb=), and probe with their profile (profile=, --profile)"
    )
    return (
        f"plan: hook {label!r} sends {payloads[kind]:,} bytes in one {kind}, and the largest that the probe sent had "
        f"{probe.costs[kind].largest:,}; beyond {REACH} times that nothing is predicted. To reach it, {advice}."
    )


def _listed(hosts: Sequence[str]) -> str:
    """Return each host once, with how many ranks it has if there are several."""
    return ", ".join(
        f"{host} ({hosts.count(host)} ranks)" if hosts.count(host) > 1 else host for host in dict.fromkeys(hosts)
    )
