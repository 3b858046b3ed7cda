"""Every hook's step over one network, beside what it costs in accuracy: `plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from commhooks.experiments.accuracy import Accuracy
from commhooks.experiments.advice import Advice, Cost, Option, advise, line_of, predicted
from commhooks.experiments.links.link import format_rate
from commhooks.experiments.planning.candidates import ALL_REDUCE, DENSE, NOOP
from commhooks.experiments.planning.errors import ProfileError
from commhooks.experiments.planning.predicting import CHECKED_RATES, Prediction, predict, was_measured_over
from commhooks.experiments.planning.profiles import HookProfile, Profile
from commhooks.experiments.timing.link import Link, Network
from commhooks.experiments.timing.rounds import Rounds
from commhooks.experiments.timing.sharded import PLAIN
from commhooks.making import compressor_in_file
from commhooks.units import seconds_in_words

MOST_CONTRADICTION = 0.3
"""The error of the plain all-reduce's prediction, relative to its measured step, beyond which nothing is recommended:
the network and the profile do not describe the same thing."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A hook, and what a step under it is predicted to take and known to cost."""

    label: str
    """The hook's name with settings and policy."""
    seconds: float
    uncertainty: float
    """Seconds in either direction: one standard deviation, roughly."""
    speed_up: float
    """The speed-up over all-reduce, or over plain FSDP2."""
    deviation: float
    """The relative uncertainty of the speed-up: one standard deviation."""
    utilisation: float
    """The part of the step that a rank needs without communication."""
    bytes_sent: int
    """Bytes sent per step and rank, averaged over ranks."""
    code: str
    """The line that trains with it; empty: nothing is to be attached."""
    costs: tuple[Cost, ...] = ()
    """What it cost in accuracy, by task; empty: it was not measured."""
    state_bytes: int = 0

    @property
    def option(self) -> Option:
        """The choice as the advice sees it."""
        return Option(hook=self.label, speed_up=predicted(self.speed_up, self.deviation), costs=self.costs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Every hook's step over one network, on one number of ranks."""

    ranks: int
    choices: tuple[Choice, ...]
    """Fastest first."""
    compared: str
    """The label with which others are compared: all-reduce, or plain FSDP2."""
    advice: Advice
    """Which hook to use, and why."""
    bound: float
    """The largest possible speed-up: the step with which others are compared, over the step without communication."""
    plain_error: float | None = None
    """Predicted over measured step of the plain all-reduce, minus 1; None: it was not measured over this network."""

    def of(self, label: str) -> Choice:
        """Return the choice with this label."""
        return {one.label: one for one in self.choices}[label]


def plan(
    profile: Profile,
    network: Network,
    *,
    rounds: Mapping[str, tuple[str, Rounds]] | None = None,
    sharded: bool = False,
    accuracy: Accuracy | None = None,
) -> Plan:
    """Predict the step of every hook in a profile over a network, and recommend one, or say why none.

    Args:
        profile: Measured by `profile`, or made by `profile_from_tables`.
        network: A `Probe` of as many ranks as the profile's, or a `Link`.
        rounds: DiLoCo's hooks by label: the label of each one's compressor in the profile, and its rounds.
        sharded: Whether FSDP2 shards the model. Hooks that cannot return shards are left out.
        accuracy: What compressors cost in accuracy; None: the package's.

    Raises:
        ProfileError: The profile lacks a hook, or contradicts itself.
        ProbeError: A hook sends messages that are far larger than those of the probe.
        SettingsError: The probe has other ranks than the profile.

    """
    missing = [label for label in (NOOP, ALL_REDUCE) if label not in profile.hooks]
    if missing:
        raise ProfileError(f"plan: the profile lacks hook {missing[0]!r}, with which others are compared.")
    accuracy = Accuracy.read() if accuracy is None else accuracy
    compared, noop = (PLAIN if sharded else DENSE), profile.noop.seconds.median
    found: dict[str, tuple[Prediction, HookProfile]] = {}
    for label, hook in profile.hooks.items():
        if label == NOOP and not sharded:
            continue
        if label != NOOP and sharded and (hook.policy != "fifo" or not compressor_in_file(hook.hook).scatters):
            continue
        found[{NOOP: PLAIN, ALL_REDUCE: DENSE}.get(label, label)] = (
            predict(profile, network, label, sharded=sharded),
            hook,
        )
    for label, (compressor, own) in (rounds or {}).items():
        found[label] = predict(profile, network, compressor, rounds=own), profile.hooks[compressor]
    base = found[compared][0]
    choices = [
        Choice(
            label=label,
            seconds=one.seconds,
            uncertainty=one.uncertainty,
            speed_up=base.seconds / one.seconds,
            deviation=one.deviation_beside(base),
            utilisation=min(1.0, noop / one.seconds),
            bytes_sent=one.time.bytes_sent,
            code="" if label in (DENSE, PLAIN) else _code(label, hook, sharded=sharded),
            costs=() if label == PLAIN else accuracy.costs_of(label),
            state_bytes=hook.state_bytes,
        )
        for label, (one, hook) in found.items()
    ]
    choices.sort(key=lambda one: one.seconds)
    error = None
    if not sharded and was_measured_over(profile, network):
        error = base.seconds / profile.plain.seconds.median - 1
    options = [one.option for one in choices if one.label != compared]
    return Plan(
        ranks=profile.ranks,
        choices=tuple(choices),
        compared=compared,
        advice=advise(options, baseline=compared, unchecked=_unchecked(profile, network, base, error)),
        bound=max(1.0, base.seconds / noop),
        plain_error=error,
    )


def _unchecked(profile: Profile, network: Network, base: Prediction, error: float | None) -> str:
    """Return why no prediction holds: the rate was never checked, or the plain all-reduce took another time."""
    low, high = CHECKED_RATES
    if isinstance(network, Link) and not low <= network.rate <= high:
        return (
            f"predictions were compared with real steps from {format_rate(low)} to {format_rate(high)}, and "
            f"{format_rate(network.rate)} is beyond"
        )
    if error is not None and abs(error) > MOST_CONTRADICTION:
        return (
            f"the plain all-reduce should take {seconds_in_words(base.seconds)} a step and was measured to take "
            f"{seconds_in_words(profile.plain.seconds.median)}, so plan again without other load"
        )
    return ""


def _code(label: str, hook: HookProfile, *, sharded: bool) -> str:
    """Return the line of Python with which a model is trained under a hook."""
    return f'commhooks.attach_sharded(model, "{hook.hook}")' if sharded else line_of(label)
