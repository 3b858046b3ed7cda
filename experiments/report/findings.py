"""What follows from the numbers, in sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from commhooks.units import bytes_in_words, counted, three_digits

from ..intervals import Estimate
from ..outcomes import Outcome, Setting, Versus
from ..runs import RunSettings
from ..summary import SMOOTHING_STEPS
from .words import (
    bounds,
    link_in_words,
    listed,
    rate_and_more,
    seconds_in_words,
    signed,
)


def finding(setting: Setting) -> str:
    """Return which hook reached the target sooner than the baseline and by how much, or that none did."""
    first = setting.baseline
    if first is None:
        return "The baseline has no finished run here, so nothing is compared."
    if not setting.versus:
        return f"Only {first.hook} was run: there is nothing to compare."
    if not math.isfinite(setting.target):
        return no_target(setting)
    candidates = [one for one in setting.outcomes[1:] if _is_comparable(one, first)]
    # One whose interval lies above 1 goes before one that may only have been lucky.
    best = max(
        candidates,
        key=lambda one: (setting.versus[one.hook].to_target.sign == 1, setting.versus[one.hook].to_target.mean),
        default=None,
    )
    said = [_of_best(setting, first, best), *_of_others(setting, first, best)]
    if setting.settings.steps < 2 * SMOOTHING_STEPS:
        said.append(
            f"A run of {counted(setting.settings.steps, 'step')} reaches a mean over {SMOOTHING_STEPS} near its end or "
            "never, so these times say little about how fast a hook learns."
        )
    if len(setting.seeds) == 1:
        said.append("One seed only: there are no intervals, so another run may say otherwise.")
    return " ".join(said)


def no_target(setting: Setting) -> str:
    """Return why there is no target loss, and what to do."""
    first = setting.outcomes[0]
    what = f"{first.hook} diverged" if first.diverged else f"The loss of {first.hook} did not fall"
    return f"{what}, so there is no target; name one with --target-loss."


def names_of(settings: Sequence[Setting]) -> list[str]:
    """Return a name for each setting: whatever distinguishes it from the others."""
    return distinguished([setting.settings for setting in settings])


def distinguished(settings: Sequence[RunSettings]) -> list[str]:
    """Return for each of these settings whatever distinguishes it from the others; the task if nothing does."""
    parts = [_parts(each) for each in settings]
    shown = [name for name in _parts(settings[0]) if len({each[name] for each in parts}) > 1] if settings else []
    return [" · ".join(each[name] for name in shown or ("task", "link", "ranks")) for each in parts]


def lead(settings: Sequence[Setting]) -> list[str]:
    """Return what a reader must know before the first number."""
    hooks = {outcome.hook for one in settings for outcome in one.outcomes}
    seeds = {seed for one in settings for seed in one.seeds}
    said = [f"{counted(len(hooks), 'hook')}, {counted(len(seeds), 'seed')}, {counted(len(settings), 'setting')}."]
    tasks = list(dict.fromkeys(one.settings.task.label for one in settings))
    said[0] = f"{said[0][:-1]}; {'task' if len(tasks) == 1 else 'tasks'} {listed(tasks)}."
    ranks = sorted({one.settings.ranks for one in settings})
    links = list(dict.fromkeys(link_in_words(one.settings.link) for one in settings))
    if len(links) == 1:
        said.append(f"{listed([str(n) for n in ranks])} ranks over {links[0]}.")
    else:
        said.append(f"{listed([str(n) for n in ranks])} ranks over {len(links)} links.")
    optimizers = list(dict.fromkeys(_optimizer(one.settings) for one in settings))
    if optimizers != [_optimizer(RunSettings(task=settings[0].settings.task))]:
        said.append(f"Optimizers: {listed(optimizers)}.")
    for stated in dict.fromkeys(one.settings.compute for one in settings):
        said += filter(None, [dilation([one for one in settings if one.settings.compute == stated])])
    said.append(
        "Runs of one setting and seed train the same model on the same data for the same number of steps, and take "
        "turns, one step each; only the communication hook differs."
    )
    if any(one.settings.link.schedule for one in settings):
        said.append(
            "Where the rate of a link changes during a run, hooks see its phases at different steps: compare whole "
            "runs, or the time to the target, rather than median steps. Runs on hosts with such a link do not take "
            "turns."
        )
    return said


def dilation(settings: Sequence[Setting]) -> str:
    """Return how the compute that these settings state relates to what it takes here; nothing if none is stated."""
    stated = settings[0].settings.compute
    if stated is None:
        return ""
    results = [one for setting in settings for outcome in setting.outcomes for one in outcome.results.values()]
    factor = _range([one.dilation for one in results], "{:.2f} ×".format)
    here = [one.compute_here for one in results if one.compute_here is not None]
    measured = f"; it took {_range(here, seconds_in_words)} here" if here else ""
    return (
        f"A step's compute is stated as {stated}{measured}: time is dilated {factor}, so that the link is as slow, "
        "compared with the compute, as it would be on that processor, and all times are that processor's."
    )


def _of_best(setting: Setting, first: Outcome, best: Outcome | None) -> str:
    loss = f"a training loss of {setting.target:.3f}"
    if not first.reached:
        return _without_baseline(setting, first, loss)
    if best is None:
        return (
            f"Compression does not pay here: {first.hook} reached {loss} after "
            f"{seconds_in_words(first.seconds_to_target.mean)}, and no other hook with all of its seeds."
        )
    versus = setting.versus[best.hook]
    faster = versus.to_target
    ours, theirs = (
        seconds_in_words(statistics.fmean(one.seconds_to_target.by_seed[seed] for seed in faster.by_seed))
        for one in (best, first)
    )
    took = f"{ours} instead of {theirs}"
    if faster.seeds < len(setting.seeds):
        took += f" with the {counted(faster.seeds, 'seed')} in which both did"
    if faster.sign == 0:
        return (
            f"No difference seen in the time to {loss}: the best, {best.hook}, took {took}, {_faster(faster)}, "
            "and that interval holds 1. Whether compression pays here is open."
        )
    if faster.mean <= 1:
        return (
            f"Compression does not pay here: no hook reached {loss} sooner than {first.hook}. The nearest, "
            f"{best.hook}, took {took} ({_faster(faster)})."
        )
    reached = f"in {len(best.reached)} of {counted(len(best.results), 'seed')}"
    moved, all_moved = (bytes_in_words(one.moved_bytes.mean) for one in (best, first))
    return (
        f"{best.hook} reached {loss} {reached}: {took}, {_faster(faster)}. A rank moved {moved} instead of "
        f"{all_moved} in the whole run. {_held_out(versus)}"
    )


def _without_baseline(setting: Setting, first: Outcome, loss: str) -> str:
    """Return which hooks reached the target although the baseline never did."""
    reached = [
        f"{one.hook} did in {len(one.reached)} of {counted(len(one.results), 'seed')}, after "
        f"{seconds_in_words(one.seconds_to_target.mean)}"
        for one in setting.outcomes
        if one.reached
    ]
    if not reached:
        return f"No hook reached {loss}."
    return f"{first.hook} never reached {loss}; {listed(reached)}."


def _of_others(setting: Setting, first: Outcome, best: Outcome | None) -> list[str]:
    said, others = [], [one for one in setting.outcomes if one is not first]
    slower = [one.hook for one in others if one is not best and setting.versus[one.hook].to_target.sign == -1]
    if slower:
        said.append(f"Slower than {first.hook}: {listed(slower)}.")
    never = [one.hook for one in setting.outcomes if not one.reached and not one.diverged]
    if never and first.reached:
        said.append(f"Never reached by {listed(never)}.")
    diverged = [f"{one.hook} ({len(one.diverged)} of {len(one.results)})" for one in setting.outcomes if one.diverged]
    if diverged:
        said.append(f"Diverged: {listed(diverged)}.")
    return said


def _held_out(versus: Versus) -> str:
    """Return how the held-out loss differs, and what could have been missed."""
    change, interval = versus.loss, versus.loss.interval
    if not change.seeds:
        return ""
    if set(change.by_seed.values()) == {0.0}:
        return "Its held-out loss is the same."
    if interval is None:
        return f"Its held-out loss differs by {signed(change.mean)}."
    if change.sign == 0:
        missed = max(abs(interval.low), abs(interval.high))
        return f"No difference seen in the held-out loss; one of up to {missed:.3f} could have been missed."
    which = "higher" if change.mean > 0 else "lower"
    low, high = sorted((abs(interval.low), abs(interval.high)))
    return f"Its held-out loss is {which} by {abs(change.mean):.3f} ({low:.3f} to {high:.3f})."


def _faster(found: Estimate) -> str:
    """Return '6.50 times as fast (95 % interval 6.10 to 6.90)'."""
    interval = "" if found.interval is None else f" (95 % interval {bounds(found.interval, three_digits)})"
    return f"{three_digits(found.mean)} times as fast{interval}"


def _is_comparable(one: Outcome, first: Outcome) -> bool:
    """Return whether the hook reached the target with every seed with which the baseline did, without diverging."""
    expected = first.reached.keys() & one.results.keys()
    return not one.diverged and bool(expected) and expected <= one.reached.keys()


def _parts(settings: RunSettings) -> dict[str, str]:
    rate, more = rate_and_more(settings.link)
    return {
        "task": settings.task.label,
        "link": "real network" if settings.link.kind == "real" else rate,
        "latency": more or "no latency",
        "kind": settings.link.kind,
        "ranks": f"{settings.ranks} ranks",
        "optimizer": _optimizer(settings),
        "compute": f"compute {settings.compute or 'as here'}",
        "ddp": f"{settings.ddp} DDP",
        "bucket": f"{settings.bucket_cap_mb:g} MiB buckets" if settings.bucket_cap_mb else "usual buckets",
        "steps": counted(settings.steps, "step"),
        "evaluate": f"evaluated every {settings.evaluate_every}",
    }


def _optimizer(settings: RunSettings) -> str:
    return "the task's own optimizer" if settings.optimizer is None else settings.optimizer.label


def _range(values: Sequence[float], form: Callable[[float], str]) -> str:
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"
