"""Findings from the numbers, in sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from commhooks.units import bytes_in_words, counted, three_digits

from ..results.former_verdicts import Difference, Judgement, Verdict, judgements, losses_of
from ..results.intervals import LEAST_SEEDS, Estimate
from ..results.outcomes import SHOWN, USUAL_BASELINE, Outcome, Setting
from ..results.summary import SMOOTHING_STEPS
from ..runs import RunSettings
from .words import (
    link_in_words,
    listed,
    rate_and_more,
    seconds_in_words,
    signed,
    spread_of,
    with_bounds,
)

_KINDS = {Verdict.PAYS: "Also pay", Verdict.OPEN: "Not settled", Verdict.COSTS: "Do not pay"}


def finding(setting: Setting) -> str:
    """Return whether a hook pays, after the same time first and at equal steps second, or that this is not settled."""
    first = setting.baseline
    if first is None:
        return "The baseline has no finished run here, so nothing is compared."
    if not setting.versus:
        return f"Only {first.hook} was run: there is nothing to compare."
    if setting.is_silent:
        return f"No bytes were moved with {counted(setting.settings.ranks, 'rank')}: there is nothing to compress."
    judged = judgements(setting)
    best = _best(setting, judged)
    said = [_verdict(setting, first, judged, best)]
    if best is not None:
        said.append(_at_equal_steps(setting, first, best))
    said += _of_others(setting, judged, best)
    if best is not None:
        said.append(margin_in_words(setting))
    if not math.isfinite(setting.target):
        said.append(no_target(setting))
    if setting.settings.steps < 2 * SMOOTHING_STEPS:
        said.append(
            f"A run of {counted(setting.settings.steps, 'step')} reaches a mean over {SMOOTHING_STEPS} near its end or "
            "never, so these times say little about how fast a hook learns."
        )
    if len(setting.seeds) < LEAST_SEEDS:
        said.append(
            "One seed only: another may say otherwise."
            if len(setting.seeds) == 1
            else "Two seeds: both values are shown; from three on there are intervals."
        )
    return " ".join(said)


def margin_in_words(setting: Setting) -> str:
    """Return from where on a difference of losses matters in a setting with a baseline."""
    why = f"{100 * setting.margins.matters:g} % of what the training loss of {setting.outcomes[0].hook} fell"
    if setting.margin == SHOWN:
        return f"A difference of losses matters above {SHOWN:g}, half of the last digit shown."
    return f"A difference of losses matters above {setting.margin:.3f}, {why}."


def no_target(setting: Setting) -> str:
    """Return why there is no target loss, and what to do."""
    first = setting.outcomes[0]
    if first.diverged:
        return f"{first.hook} diverged, so there is no target: name one with --target-loss."
    what = f"The loss of {first.hook} did not fall, so there is no target"
    return f"{what}: name one with --target-loss, or take more steps."


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
    counts = counted(ranks[0], "rank") if len(ranks) == 1 else f"{listed([str(n) for n in ranks])} ranks"
    links = list(dict.fromkeys(link_in_words(one.settings.link) for one in settings))
    if len(links) == 1:
        said.append(f"{counts} over {links[0]}.")
    else:
        said.append(f"{counts} over {len(links)} links.")
    optimizers = list(dict.fromkeys(_optimizer(one.settings) for one in settings))
    if optimizers != [_optimizer(RunSettings(task=settings[0].settings.task))]:
        said.append(f"Optimizers: {listed(optimizers)}.")
    for stated in dict.fromkeys(one.settings.compute for one in settings):
        said += filter(None, [dilation([one for one in settings if one.settings.compute == stated])])
    said.append(
        "Runs of one setting and seed train the same model on the same data, and take turns, one step each; only the "
        "communication hook differs."
    )
    runs = [run for one in settings for outcome in one.outcomes for run in outcome.results.values()]
    times = {run.goal.steps // run.settings.steps for run in runs if run.goal is not None}
    if times:
        said.append(
            "After the steps asked for, a hook goes on until it has reached the target, or has had the baseline's "
            f"training time, for at most {listed([str(n) for n in sorted(times)], 'or')} times the steps."
        )
    if any(one.settings.link.schedule for one in settings):
        said.append(
            "Where the rate of a link changes during a run, hooks see its phases at different steps: compare whole "
            "runs, or the time to the target, rather than steps. Runs on hosts with such a link do not take "
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


def _best(setting: Setting, judged: Mapping[str, Judgement]) -> Outcome | None:
    """Return the hook to be named first: one that pays before one that may, and the soonest at the target of these."""
    order = {Verdict.PAYS: 2, Verdict.OPEN: 1, Verdict.COSTS: 0}

    def rank(one: Outcome) -> tuple[float, ...]:
        judgement, versus = judged[one.hook], setting.versus[one.hook]
        # A sure gain goes before one that may have been luck; a hook that never reached the target comes last.
        sooner = versus.to_target.mean if versus.to_target.seeds == versus.seeds else 0.0
        gained = -versus.same_time.mean if versus.same_time.seeds else -math.inf
        return order[judgement.verdict], judgement.target == 1, sooner, gained

    comparable = [one for one in setting.outcomes[1:] if setting.versus[one.hook].seeds]
    return max((one for one in comparable if not judged[one.hook].diverged), key=rank, default=None)


def _verdict(setting: Setting, first: Outcome, judged: Mapping[str, Judgement], best: Outcome | None) -> str:
    """Return what holds after the same time."""
    dense = first.hook == USUAL_BASELINE
    none_pays = "Compression does not pay here" if dense else f"No hook beats {first.hook} here"
    if best is None:
        diverged = all(one.diverged for one in judged.values())
        return (
            f"{none_pays}: every other hook diverged." if diverged else f"Nothing is compared with {first.hook} here."
        )
    judgement = judged[best.hook]
    what = " ".join(filter(None, [_to_target(setting, first, best), _after_the_same_time(setting, first, best)]))
    if judgement.verdict is Verdict.PAYS:
        return f"{best.hook} {'pays' if dense else f'beats {first.hook}'} here. {what}"
    if judgement.verdict is Verdict.COSTS:
        return f"{none_pays}. The nearest is {best.hook}. {what}"
    if {judgement.target, judgement.same_time} >= {1, -1}:
        why = "its time to the target and its loss after the same time disagree"
    elif judgement.votes == {1, -1}:
        why = "its training loss and its held-out loss disagree"
    elif judgement.ended_early:
        why = f"it ended before it had {first.hook}'s time or reached the target, {_more_steps(best)}"
    elif judgement.same_time is None:
        why = f"{first.hook} diverged"
    elif losses_of(setting, best.hook).same_time is Difference.SAME:
        why = "after the same time its loss differs by less than matters, and it was not surely sooner at the target"
    else:
        why = "what the runs show may be luck, so it needs more steps or seeds"
    question = "Whether compression pays here" if dense else f"Whether a hook beats {first.hook} here"
    return f"{question} is not settled. The best is {best.hook}: {why}. {what}".rstrip()


def _more_steps(one: Outcome) -> str:
    """Return how a hook that ended early gets more steps."""
    if any(run.goal is not None and len(run.steps) < run.goal.steps for run in one.results.values()):
        return "so it needs more steps"
    return "so it must be run again with a larger --go-on"


def _to_target(setting: Setting, first: Outcome, best: Outcome) -> str:
    """Return how long the hook and the baseline took to the target."""
    if not math.isfinite(setting.target):
        return ""
    loss, faster = f"a training loss of {setting.target:.3f}", setting.versus[best.hook].to_target
    its, theirs = (f"in {len(one.reached)} of {counted(len(one.results), 'seed')}" for one in (best, first))
    if not best.reached and not first.reached:
        return f"Neither it nor {first.hook} reached {loss}."
    if not faster.seeds and best.reached and first.reached:
        ours, baselines = (seconds_in_words(one.seconds_to_target.mean) for one in (best, first))
        both = f"It reached {loss} {its}, after {ours}, {first.hook} {theirs}, after {baselines}"
        return f"{both}; never with the same seed."
    if not faster.seeds:
        one, other, how = (best, first, its) if best.reached else (first, best, theirs)
        after = seconds_in_words(one.seconds_to_target.mean)
        steps = max(len(result.steps) for result in other.results.values())
        never = f"{'it' if other is best else other.hook} did not in up to {counted(steps, 'step')}"
        return f"{'It' if one is best else one.hook} reached {loss} {how}, after {after}; {never}."
    ours, baselines = (
        seconds_in_words(statistics.geometric_mean(one.seconds_to_target.by_seed[seed] for seed in faster.by_seed))
        for one in (best, first)
    )
    few = f" with the {counted(faster.seeds, 'seed')} in which both did" if faster.seeds < len(setting.seeds) else ""
    return f"It reached {loss} {its}: {ours} instead of {baselines}{few}, {_faster(faster)}."


def _after_the_same_time(setting: Setting, first: Outcome, best: Outcome) -> str:
    """Return the training losses of both when they had trained for as long, and their difference if seeds differ."""
    versus = setting.versus[best.hook]
    moments = [versus.moments[seed] for seed in versus.same_time.by_seed]
    if not moments:
        return ""
    seconds, ours, theirs = (
        statistics.fmean(values) for values in zip(*((m.seconds, m.ours, m.baselines) for m in moments), strict=True)
    )
    found, then, losses = versus.same_time, versus.held_out_then, losses_of(setting, best.hook)
    said = (
        f"After the same {seconds_in_words(seconds)} its training loss was {ours:.3f}, that of {first.hook} "
        f"{theirs:.3f}{_with_spread(found)}{_MATTERING[losses.same_time]}"
    )
    return f"{said}; held-out, {_differs(then, losses.held_out_then)}." if losses.held_out_then else f"{said}."


def _at_equal_steps(setting: Setting, first: Outcome, best: Outcome) -> str:
    """Return what the steps of the hook cost and brought, as many as the baseline's."""
    versus = setting.versus[best.hook]
    moved, all_moved = (bytes_in_words(one.moved_bytes.mean) for one in (best, first))
    difference = losses_of(setting, best.hook).equal_steps
    held_out = f"; held-out, {_differs(versus.loss, difference)}" if difference else ""
    return (
        f"At equal steps ({setting.settings.steps:,}) a rank moved {moved} instead of {all_moved}, and a step was "
        f"{_faster(versus.step)}{held_out}."
    )


def _of_others(setting: Setting, judged: Mapping[str, Judgement], best: Outcome | None) -> list[str]:
    alone = [one.hook for one in setting.outcomes[1:] if not setting.versus[one.hook].seeds]
    others = [one for one in setting.outcomes[1:] if one is not best and one.hook not in alone]
    kinds = {
        kind: [one.hook for one in others if judged[one.hook].verdict is kind]
        for kind in (Verdict.PAYS, Verdict.COSTS, Verdict.OPEN)
    }
    said = [f"{word}: {listed(kinds[kind])}." for kind, word in _KINDS.items() if kinds[kind]]
    if alone:
        said.append(f"Without a seed in common with {setting.outcomes[0].hook}, so not compared: {listed(alone)}.")
    never = [one.hook for one in setting.outcomes if not one.reached and not one.diverged]
    if never and len(never) < len(setting.outcomes) and math.isfinite(setting.target):
        said.append(f"Never at the target: {listed(never)}.")
    diverged = [f"{one.hook} ({len(one.diverged)} of {len(one.results)})" for one in setting.outcomes if one.diverged]
    if diverged:
        said.append(f"Diverged: {listed(diverged)}.")
    return said


_MATTERING = {
    Difference.LOWER: ", which matters",
    Difference.HIGHER: ", which matters",
    Difference.SAME: ", which does not matter",
    Difference.OPEN: "; whether that matters is not settled",
    None: "",
}


def _differs(change: Estimate, difference: Difference | None) -> str:
    """Return how a loss differs from the baseline's, and whether that matters."""
    if all(float(f"{value:.3f}") == 0 for value in change.by_seed.values()):
        return "its loss is the same"
    if change.sign == 0:
        return f"its loss differs by {with_bounds(change, signed)}{_MATTERING[difference]}"
    side = "higher" if change.mean > 0 else "lower"
    return f"its loss is {side} by {abs(change.mean):.3f}{_with_spread(change)}{_MATTERING[difference]}"


def _with_spread(difference: Estimate) -> str:
    """Return ' (difference -0.112 to -0.098)', or both of two seeds; nothing for one seed."""
    within = spread_of(difference, signed)
    word = "difference" if difference.interval else "differences"
    return f" ({word} {within})" if within else ""


def _faster(found: Estimate) -> str:
    """Return '6.50 times as fast (95 % interval 6.10 to 6.90)', or with both values of two seeds."""
    within = spread_of(found, three_digits)
    interval = f" ({'95 % interval ' if found.interval else ''}{within})" if within else ""
    return f"{three_digits(found.mean)} times as fast{interval}"


def _parts(settings: RunSettings) -> dict[str, str]:
    rate, more = rate_and_more(settings.link)
    return {
        "task": settings.task.label,
        "link": "real network" if settings.link.kind == "real" else rate,
        "latency": more or "no latency",
        "kind": settings.link.kind,
        "ranks": counted(settings.ranks, "rank"),
        "optimizer": _optimizer(settings),
        "compute": f"compute {settings.compute or 'as here'}",
        "ddp": "sharded (FSDP2)" if settings.is_sharded else f"{settings.ddp} DDP",
        "bucket": f"{settings.bucket_cap_mb:g} MiB buckets" if settings.bucket_cap_mb else "usual buckets",
        "steps": counted(settings.steps, "step"),
        "evaluate": f"evaluated every {settings.evaluate_every}",
    }


def _optimizer(settings: RunSettings) -> str:
    return "the task's own optimizer" if settings.optimizer is None else settings.optimizer.label


def _range(values: Sequence[float], form: Callable[[float], str]) -> str:
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"
