"""The output of an estimate: a table, the conclusion in words, and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from commhooks.native.library import compiled
from commhooks.units import bytes_in_words, counted, seconds_in_words, three_digits

from ..links.link import format_rate
from ..predicting.costs import passes_in_words
from ..predicting.estimates import FASTER, Estimate, HookEstimate
from ..predicting.paying import Rates
from ..report.table import plain_table
from ..report.words import NEVER, percent, times
from ..runs import strict

_LEAST_SLOWER = 1e-3  # of a step; less is not worth a sentence


def show(estimate: Estimate, console: Console, costs: Path | None = None) -> None:
    """Print a row for each compressor, the fastest first, and the conclusions; `costs` is the file of their costs."""
    link = estimate.link
    table = plain_table(
        f"{counted(estimate.parameters, 'parameter')} in "
        f"{counted(estimate.buckets, 'sharded module' if estimate.is_sharded else 'bucket')}, "
        f"{counted(estimate.ranks, 'rank')}, {rate_in_words(link.rate)}, {backend_in_words(estimate)}",
        ("step", "speed-up", "sent", "pays at rates", *(task for task, _ in estimate.tasks)),
    )
    for one in estimate.hooks:
        dense = one.is_baseline
        table.add_row(
            escape(one.hook),
            seconds_in_words(one.time.seconds),
            times(one.speed_up),
            bytes_in_words(one.time.bytes_sent),
            NEVER if dense else rates_in_words(one.pays_between),
            *(NEVER if dense else loss_in_words(one, task) for task, _ in estimate.tasks),
        )
    console.print(table)
    sentences = (conclusion(estimate), safest_in_words(estimate), *slower_in_words(estimate))
    for sentence in (*sentences, *other_passes_in_words(estimate)):
        console.print(sentence, highlight=False, markup=False)
    columns = " and ".join(f"{task} ({unit})" for task, unit in estimate.tasks)
    measured = "measured for this version" if costs is None else f"in {costs}"
    console.print(
        f"Sent: by each rank. {columns}: the leaderboard's differences from dense all-reduce, on small tasks. The "
        f"costs are those {measured}, {passes_in_words(estimate.level)}, times the copy of memory of this processor "
        f"({bytes_in_words(estimate.copy_rate)}/s).",
        style="dim",
        highlight=False,
        markup=False,
    )


def other_passes_in_words(estimate: Estimate) -> list[str]:
    """Return a sentence if other passes are in use here than in the measurement of the costs: codes cost otherwise."""
    here = compiled()
    if here.level == estimate.level:
        return []
    return [
        f"The costs were measured {passes_in_words(estimate.level)}, and here it is otherwise: {here}. What codes cost "
        "here is measured by commhooks estimate --measure-costs FILE."
    ]


def conclusion(estimate: Estimate) -> str:
    """Return a sentence, such as 'At 1 Gbit/s powersgd:rank=4 makes steps 1.62× as fast as dense all-reduce'."""
    rate, best = rate_in_words(estimate.link.rate), estimate.best
    baseline = "plain FSDP2" if estimate.is_sharded else "dense all-reduce"
    if best.is_baseline:
        others = [one for one in estimate.hooks if not one.is_baseline]
        said = f"At {rate} none pays: {baseline} is the fastest."
        slower = [(high, one.hook) for one in others for _, high in one.pays_between if high <= estimate.link.rate]
        faster = [(low, one.hook) for one in others for low, _ in one.pays_between if low >= estimate.link.rate]
        if slower:
            said += " The first to pay on slower links is {1}, below {0}.".format(*_in_words(max(slower)))
        if faster:
            said += " The first to pay on faster links is {1}, above {0}.".format(*_in_words(min(faster)))
        return said
    below, above = next(pair for pair in best.pays_between if pair[0] <= estimate.link.rate <= pair[1])
    limits = [f"below {rate_in_words(below)}"] if below > 0 else []
    limits += [f"above {rate_in_words(above)}"] if above < math.inf else []
    until = f"{baseline} is faster {' and '.join(limits)}" if limits else "it is faster at every rate"
    return f"At {rate} {best.hook} makes steps {times(best.speed_up)} as fast as {baseline}; {until}."


def safest_in_words(estimate: Estimate) -> str:
    """Return a sentence about the safest gain: a compressor that pays and cost no accuracy where it was measured."""
    safest, tasks = estimate.safest, " and ".join(task for task, _ in estimate.tasks)
    if safest is not None:
        return (
            f"The safest gain is {safest.hook}, {times(safest.speed_up)} as fast: on {tasks} it cost no more accuracy "
            "than another seed does."
        )
    if not any(one.pays for one in estimate.hooks):
        return "So there is no gain for which accuracy could be at risk."
    return (
        f"None that pays is known to be safe: on {tasks} each cost more accuracy than another seed does, or was not "
        "measured."
    )


def slower_in_words(estimate: Estimate) -> list[str]:
    """Return a sentence about steps that are computed to be slower on a faster link; nothing if there are none."""
    slower = [(one.on_faster_link / one.time.seconds - 1, one.hook) for one in estimate.hooks]
    found = [f"{hook} by {percent(part)}" for part, hook in sorted(slower, reverse=True) if part > _LEAST_SLOWER]
    if not found:
        return []
    return [
        f"On a link {FASTER:g} times as fast these steps are computed to be slower: {', '.join(found)}. There buckets "
        "come while the processor is busy with others; differences of that size decide nothing."
    ]


def backend_in_words(estimate: Estimate) -> str:
    """Return the backend and its CPU time for a byte: 'gloo (1.43 ns of CPU time a byte)'."""
    if estimate.backend == "none":
        return "no backend (sending takes no CPU time)"
    return f"{estimate.backend} ({three_digits(1e9 * estimate.link.seconds_per_byte)} ns of CPU time a byte)"


def as_json(estimate: Estimate) -> str:
    """Return the estimate as JSON: seconds, bytes, bits per second; numbers that are not finite as text.

    `break_even` is null unless the compressor pays at every rate below it (0: at none, "inf": at all). `pays_between`
    has all ranges of rates. A task of `accuracy` is null if the compressor was not measured on it.
    """
    link = {name: value for name, value in dataclasses.asdict(estimate.link).items() if value is not None}
    hooks = [
        {
            "hook": one.hook,
            **dataclasses.asdict(one.time),
            "utilisation": one.time.utilisation,
            "speed_up": one.speed_up,
            "pays": one.pays,
            "break_even": None if math.isnan(one.break_even) else one.break_even,
            "pays_between": one.pays_between,
            "seconds_on_faster_link": one.on_faster_link,
            "accuracy": {task: _loss(one, task) for task, _ in estimate.tasks},
            "is_safe": one.is_safe,
        }
        for one in estimate.hooks
    ]
    whole = {
        "parameters": estimate.parameters,
        "buckets": estimate.buckets,
        "baseline": estimate.baseline,
        "ranks": estimate.ranks,
        "link": link,
        "backend": estimate.backend,
        "copy_rate": estimate.copy_rate,
        "costs_level": estimate.level,
        "faster_link": FASTER,
        "hooks": hooks,
        "safest": None if estimate.safest is None else estimate.safest.hook,
        "conclusion": conclusion(estimate),
    }
    return json.dumps(strict(whole), indent=1)


def rate_in_words(rate: float) -> str:
    """Return a rate with three digits: '3.12 Gbit/s'."""
    return format_rate(rate if math.isinf(rate) else float(f"{rate:.3g}"))


def rates_in_words(rates: Rates) -> str:
    """Return the rates at which a compressor pays: 'below 1 Gbit/s', 'above 5 Mbit/s', 'always' or 'never'."""
    return ", ".join(map(_range_in_words, rates)) or "never"


def _range_in_words(rates: tuple[float, float]) -> str:
    low, high = rates
    if low == 0:
        return "always" if math.isinf(high) else f"below {rate_in_words(high)}"
    return f"above {rate_in_words(low)}" if math.isinf(high) else f"{rate_in_words(low)} to {rate_in_words(high)}"


def _in_words(pair: tuple[float, str]) -> tuple[str, str]:
    return rate_in_words(pair[0]), pair[1]


def loss_in_words(one: HookEstimate, task: str) -> str:
    """Return a compressor's difference from dense on a task: '+0.98', 'diverged' or 'not measured'."""
    loss = next((loss for loss in one.losses if loss.task == task), None)
    if loss is None:
        return "not measured"
    mean = loss.difference.mean
    return "diverged" if mean is None else f"{round(mean, 2) + 0.0:+.2f}"  # no -0.00


def _loss(one: HookEstimate, task: str) -> dict[str, object] | None:
    loss = next((loss for loss in one.losses if loss.task == task), None)
    if loss is None:
        return None
    own = loss.difference
    return {"unit": loss.unit, "difference": own.mean, "low": own.low, "high": own.high, "is_safe": loss.is_safe}


def milliseconds(seconds: float) -> str:
    """Return milliseconds with three digits: '98.1'."""
    return three_digits(1e3 * seconds)
