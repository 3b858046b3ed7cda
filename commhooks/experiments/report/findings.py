"""A setting's name, and what was found in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commhooks.experiments.accuracy import Accuracy
from commhooks.experiments.advice import BASELINE, Advice, Option, advise
from commhooks.experiments.machine import trained_on
from commhooks.experiments.report.words import link_in_words, listed, rate_and_more, seconds_in_words
from commhooks.experiments.results.outcomes import Setting
from commhooks.experiments.runs import RunSettings
from commhooks.units import counted


def finding(setting: Setting) -> str:
    """Return which hook pays and why, that none does, or what is lacking to tell."""
    first, judged = setting.baseline, setting.judged
    if first is None:
        return "The baseline has no finished run here, so nothing is compared."
    if setting.is_silent:
        return f"No bytes were moved with {counted(setting.settings.ranks, 'rank')}: there is nothing to compress."
    if len(first.diverged) == len(first.results):
        return f"{first.hook} diverged, so nothing can be compared with it."
    if not judged:
        return f"No other hook was run with a seed of {first.hook}: there is nothing to compare."
    return advice_on(setting).sentence


def advice_on(setting: Setting) -> Advice:
    """Return which hook to use in a setting, by the rule that plans and pages follow too."""
    tables = Accuracy.read()
    options = [Option.measured(hook, one, tables.costs_of(hook)) for hook, one in setting.judged.items()]
    baseline, optimizer = setting.baseline, setting.settings.optimizer
    return advise(
        options,
        baseline=baseline.hook if baseline is not None else BASELINE,
        optimizer=optimizer.label if optimizer is not None else "",
    )


def facts_of(setting: Setting) -> str:
    """Return what a reader must know of a setting before the first number."""
    run, settings = setting.any_result, setting.settings
    seeds = f"seed{'s' if len(setting.seeds) > 1 else ''} {listed([str(seed) for seed in setting.seeds])}"
    optimizer = "" if settings.optimizer is None else f" {settings.optimizer.label},"
    taken = f"{counted(settings.steps, 'step')}, {counted(settings.ranks, 'rank')}"
    what = f"{run.parameters:,} parameters,{optimizer} {taken} over {link_in_words(settings.link)}, {seeds}."
    on = trained_on(run.machine, is_limited=settings.link.is_limited)
    changes = " Its rate changes during a run, so hooks see it at different steps." if settings.link.schedule else ""
    return f"{what} {on}{changes} {time_scale_in_words(setting)}".strip()


def time_scale_in_words(setting: Setting) -> str:
    """Return how the compute that a setting states relates to what it takes here; nothing if none is stated."""
    results = [one for outcome in setting.outcomes for one in outcome.results.values()]
    if setting.settings.compute is None:
        return ""
    factor = _range([one.time_scale for one in results], "{:.2f} ×".format)
    here = [one.compute_here for one in results if one.compute_here is not None]
    measured = f"; it took {_range(here, seconds_in_words)} here" if here else ""
    stated = f"A step's compute is stated as {setting.settings.compute}{measured}"
    return f"{stated}: time is stretched {factor}, and all times are that processor's."


def names_of(settings: Sequence[Setting]) -> list[str]:
    """Return a name for each setting: whatever distinguishes it from the others."""
    return distinguished([setting.settings for setting in settings])


def distinguished(settings: Sequence[RunSettings]) -> list[str]:
    """Return for each of these settings whatever distinguishes it from the others; the task if nothing does."""
    parts = [_parts(each) for each in settings]
    shown = [name for name in _parts(settings[0]) if len({each[name] for each in parts}) > 1] if settings else []
    return [" · ".join(each[name] for name in shown or ("task", "link", "ranks")) for each in parts]


def _parts(settings: RunSettings) -> dict[str, str]:
    rate, more = rate_and_more(settings.link)
    return {
        "task": settings.task.label,
        "link": "real network" if settings.link.kind == "real" else rate,
        "latency": more or "no latency",
        "kind": settings.link.kind,
        "ranks": counted(settings.ranks, "rank"),
        "optimizer": "the task's own optimizer" if settings.optimizer is None else settings.optimizer.label,
        "compute": f"compute {settings.compute or 'as here'}",
        "ddp": "sharded (FSDP2)" if settings.is_sharded else f"{settings.ddp} DDP",
        "bucket": f"{settings.bucket_cap_mb:g} MiB buckets" if settings.bucket_cap_mb else "usual buckets",
        "steps": counted(settings.steps, "step"),
        "evaluate": f"evaluated every {settings.evaluate_every}",
    }


def _range(values: Sequence[float], form: Callable[[float], str]) -> str:
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"
