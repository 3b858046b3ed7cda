"""The recommendation of a plan: the safest gain first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from commhooks.units import three_digits

from .accuracy import Loss

LEAST_GAIN = 0.05
"""A hook that saves less of a step than this does not pay: it is lost in the variation between runs."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A hook, and what a step under it is predicted to take and known to cost."""

    label: str
    """The hook's name with settings and policy."""
    seconds: float
    uncertainty: float
    """Seconds in either direction: one standard deviation, roughly."""
    gain: float
    """Seconds that it saves of the step that it is compared with."""
    gain_uncertainty: float
    speed_up: float
    """The speed-up over all-reduce, or over plain FSDP2."""
    utilisation: float
    """The part of the step that a rank needs without communication."""
    bytes_sent: int
    """Bytes sent per step and rank, averaged over ranks."""
    code: str
    """The line that attaches it; empty: nothing is to be attached."""
    losses: tuple[Loss, ...] = ()
    """The accuracy that these settings cost, by task; a missing task was not measured."""
    state_bytes: int = 0
    every: int = 1
    """Steps of a round, for DiLoCo."""


def recommend(
    choices: Sequence[Choice], compared: str, tasks: Sequence[tuple[str, str]]
) -> tuple[str | None, tuple[str, ...]]:
    """Return the label of the hook to use, or None, and the reasons in sentences.

    Only gains above `LEAST_GAIN` and above their uncertainty count. Of these, the fastest that cost no accuracy on any
    task is recommended; one that cost some, or was not measured, is only named. DiLoCo trains differently, so nothing
    but a comparison of the loss speaks for it; in rounds of one step it is never named.
    """
    base = next(one for one in choices if one.label == compared)
    paying = [one for one in choices if one is not base and _pays(one, base) and not _is_pointless(one)]
    safe = [one for one in paying if is_safe(one, tasks)]
    on_tasks = " and ".join(name for name, _ in tasks)
    if not paying:
        return None, (_why_none(choices, base),)
    said = []
    if safe:
        best = safe[0]
        said = [
            f"Use {best.label}: steps are {_times(best)} as fast, and on {on_tasks} it cost no more accuracy than "
            "another seed does.",
            f"In Python: {best.code}",
        ]
        paying = [one for one in paying if one.seconds < best.seconds - one.gain_uncertainty]
    else:
        said = [f"No gain is known to be safe for accuracy on {on_tasks}, so measure before you use one."]
    if paying:
        fastest = paying[0]
        said.append(f"{fastest.label} would be faster, {_times(fastest)}, but {cost_in_words(fastest, tasks)}.")
    return (safe[0].label if safe else None), tuple(said)


def is_safe(choice: Choice, tasks: Sequence[tuple[str, str]]) -> bool:
    """Return whether a hook was measured on every task, and cost no more accuracy than another seed does."""
    return len(choice.losses) == len(tasks) > 0 and all(loss.is_safe for loss in choice.losses)


def cost_in_words(choice: Choice, tasks: Sequence[tuple[str, str]]) -> str:
    """Return what a hook costs in accuracy: 'it cost +0.47 nats on gpt' or 'its cost in accuracy was not measured'."""
    units = dict(tasks)
    costs = [
        f"{loss.difference.mean:+.2g} {units[loss.task]} on {loss.task}"
        if loss.difference.mean is not None
        else f"training diverged on {loss.task}"
        for loss in choice.losses
        if not loss.is_safe
    ]
    return f"it cost {' and '.join(costs)}" if costs else "its cost in accuracy was not measured"


def _pays(choice: Choice, base: Choice) -> bool:
    return choice.gain > max(LEAST_GAIN * base.seconds, choice.gain_uncertainty)


def _is_pointless(choice: Choice) -> bool:
    """Return whether it is DiLoCo in rounds of one step, which is data-parallel training with a worse optimizer."""
    return choice.label.startswith("diloco") and choice.every == 1


def _times(choice: Choice) -> str:
    return f"{three_digits(choice.speed_up)}×"


def _why_none(choices: Sequence[Choice], base: Choice) -> str:
    others = [one for one in choices if one is not base and not _is_pointless(one)]
    if not others or others[0].gain <= 0:
        return f"None pays: {base.label} is predicted to be the fastest."
    best = others[0]
    return (
        f"None pays: the best, {best.label}, would save {100 * best.gain / base.seconds:.0f} % of a step, which is "
        f"below {100 * LEAST_GAIN:g} % or within the uncertainty of {100 * best.gain_uncertainty / base.seconds:.0f} %."
    )
