"""Every hook's step over one network, beside what it costs in accuracy: `plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from commhooks.errors import SettingsError
from commhooks.making import compressor_in_file
from commhooks.units import seconds_in_words

from ..timing.link import Network
from ..timing.rounds import Rounds
from ..timing.sharded import PLAIN
from .accuracy import Accuracy, Loss
from .candidates import ALL_REDUCE, DENSE, NOOP
from .errors import ProfileError
from .predicting import Prediction, predict, was_measured_over
from .profiles import HookProfile, Profile
from .recommending import Choice, recommend

MOST_CONTRADICTION = 0.3
"""The error of the plain all-reduce's prediction, relative to its measured step, beyond which nothing is recommended:
the network and the profile do not describe the same thing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Every hook's step over one network, on one number of ranks."""

    ranks: int
    choices: tuple[Choice, ...]
    """Fastest first."""
    compared: str
    """The label with which others are compared: all-reduce, or plain FSDP2."""
    recommended: str | None
    """The label of the hook to use; None: none is recommended."""
    reasons: tuple[str, ...]
    """The recommendation, or why there is none, in sentences."""
    bound: float
    """The largest possible speed-up: the step with which others are compared, over the step without communication."""
    tasks: tuple[tuple[str, str], ...]
    """The tasks on which accuracy was measured, each with the unit of its differences."""
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
    found: dict[str, tuple[Prediction, HookProfile, int]] = {}
    for label, hook in profile.hooks.items():
        if sharded and (hook.policy != "fifo" or not compressor_in_file(hook.hook).scatters):
            continue
        if label != NOOP:
            shown = DENSE if label == ALL_REDUCE else label
            found[shown] = predict(profile, network, label, sharded=sharded), hook, 1
    if sharded:
        found[PLAIN] = predict(profile, network, NOOP, sharded=True), profile.hooks[NOOP], 1
    for label, (compressor, own) in (rounds or {}).items():
        hook = profile.hooks[compressor]
        found[label] = predict(profile, network, compressor, rounds=own), hook, own.every
    base = found[compared][0]
    choices = []
    for label, (one, hook, every) in found.items():
        choices.append(
            Choice(
                label=label,
                seconds=one.seconds,
                uncertainty=one.uncertainty,
                gain=base.seconds - one.seconds,
                gain_uncertainty=one.uncertainty_beside(base),
                speed_up=base.seconds / one.seconds,
                utilisation=min(1.0, noop / one.seconds),
                bytes_sent=one.time.bytes_sent,
                code="" if label in (DENSE, PLAIN) else _code(label, hook, rounds or {}, sharded=sharded),
                losses=() if label == PLAIN or label in (rounds or {}) else _losses(accuracy, hook),
                state_bytes=hook.state_bytes,
                every=every,
            )
        )
    choices.sort(key=lambda one: one.seconds)
    tasks = tuple((task.task, task.unit) for task in accuracy.tasks)
    error = base.seconds / profile.plain.seconds.median - 1 if was_measured_over(profile, network) else None
    recommended, reasons = recommend(choices, compared, tasks)
    if error is not None and not sharded and abs(error) > MOST_CONTRADICTION:
        recommended, reasons = None, (_contradiction(base.seconds, profile.plain.seconds.median),)
    return Plan(
        ranks=profile.ranks,
        choices=tuple(choices),
        compared=compared,
        recommended=recommended,
        reasons=reasons,
        bound=max(1.0, base.seconds / noop),
        tasks=tasks,
        plain_error=None if sharded else error,
    )


def _contradiction(predicted: float, measured: float) -> str:
    return (
        f"No hook can be recommended: the plain all-reduce should take {seconds_in_words(predicted)} a step and "
        f"was measured to take {seconds_in_words(measured)}. Plan again, over the same network and without other load."
    )


def _losses(accuracy: Accuracy, hook: HookProfile) -> tuple[Loss, ...]:
    try:
        return accuracy.losses_of(compressor_in_file(hook.hook))
    except SettingsError:  # a class of the user's, which is not imported because a file names it
        return ()


def _code(label: str, hook: HookProfile, rounds: Mapping[str, tuple[str, Rounds]], *, sharded: bool) -> str:
    """Return the line of Python with which a model is trained under a hook."""
    if label in rounds:
        own = rounds[label][1]
        given = [f"every={own.every}", f'compressor="{hook.hook}"']
        given += [f"fragments={own.fragments}"] if own.fragments > 1 else []
        given += [f"delay={own.delay}"] if own.delay else []
        return f"commhooks.DiLoCo(model, optimizer, {', '.join(given)})"
    if sharded:
        return f'commhooks.attach_sharded(model, "{hook.hook}")'
    policy = "" if hook.policy == "fifo" else f', policy="{hook.policy}"'
    return f'commhooks.attach(model, "{hook.hook}"{policy})'
