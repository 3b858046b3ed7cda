"""An estimate in words: a table, the conclusion, and JSON."""

from __future__ import annotations

import dataclasses
import json
import math

from rich.console import Console
from rich.markup import escape

from commhooks.planning.estimate import DENSE, Estimate, HookEstimate
from commhooks.units import bytes_in_words, counted, seconds_in_words, three_digits

from ..links.link import format_rate
from ..report.table import plain_table
from ..report.words import NEVER, percent, times
from ..runs import strict


def show(estimate: Estimate, console: Console) -> None:
    """Print a row for each compressor, the fastest first, and what follows."""
    link = estimate.link
    table = plain_table(
        f"{counted(estimate.parameters, 'parameter')} in {counted(estimate.buckets, 'bucket')}, "
        f"{counted(estimate.ranks, 'rank')}, {rate_in_words(link.rate)}",
        ("step", "speed-up", "sent per rank", "utilisation", "pays", "pays below"),
    )
    for one in estimate.hooks:
        dense = one.hook == DENSE
        table.add_row(
            escape(one.hook),
            seconds_in_words(one.time.seconds),
            times(one.speed_up),
            bytes_in_words(one.time.bytes_sent),
            percent(one.time.utilisation),
            NEVER if dense else ("yes" if one.pays else "no"),
            break_even_in_words(one),
        )
    console.print(table)
    console.print(conclusion(estimate), highlight=False, markup=False)
    console.print(
        f"The costs are those measured for this version, times the copy of memory of this processor "
        f"({bytes_in_words(estimate.copy_rate)}/s).",
        style="dim",
        highlight=False,
        markup=False,
    )


def conclusion(estimate: Estimate) -> str:
    """Return a sentence, such as 'At 1 Gbit/s powersgd:rank=4 makes steps 1.62× as fast as dense all-reduce'."""
    rate, best = rate_in_words(estimate.link.rate), estimate.best
    if best.hook == DENSE:
        others = [one for one in estimate.hooks if one.hook != DENSE]
        nearest = max(others, key=lambda one: one.break_even, default=None)
        if nearest is None or nearest.break_even == 0:
            return f"At {rate} none pays: dense all-reduce is the fastest."
        return (
            f"At {rate} none pays: dense all-reduce is the fastest. The first to pay on slower links is "
            f"{nearest.hook}, below {rate_in_words(nearest.break_even)}."
        )
    until = (
        "it is faster at every rate"
        if math.isinf(best.break_even)
        else f"dense all-reduce is faster above {rate_in_words(best.break_even)}"
    )
    return f"At {rate} {best.hook} makes steps {times(best.speed_up)} as fast as dense all-reduce; {until}."


def as_json(estimate: Estimate) -> str:
    """Return the estimate as JSON: seconds, bytes, bits per second; numbers that are not finite as text."""
    link = {name: value for name, value in dataclasses.asdict(estimate.link).items() if value is not None}
    hooks = [
        {
            "hook": one.hook,
            **dataclasses.asdict(one.time),
            "utilisation": one.time.utilisation,
            "speed_up": one.speed_up,
            "pays": one.pays,
            "break_even": None if math.isnan(one.break_even) else one.break_even,
        }
        for one in estimate.hooks
    ]
    whole = {
        "parameters": estimate.parameters,
        "buckets": estimate.buckets,
        "ranks": estimate.ranks,
        "link": link,
        "copy_rate": estimate.copy_rate,
        "hooks": hooks,
        "conclusion": conclusion(estimate),
    }
    return json.dumps(strict(whole), indent=1)


def rate_in_words(rate: float) -> str:
    """Return a rate with three digits: '3.12 Gbit/s'."""
    return format_rate(rate if math.isinf(rate) else float(f"{rate:.3g}"))


def break_even_in_words(one: HookEstimate) -> str:
    """Return the rate below which a compressor pays, 'always' or 'never'."""
    if math.isnan(one.break_even):
        return NEVER
    if math.isinf(one.break_even):
        return "always"
    return rate_in_words(one.break_even) if one.break_even else "never"


def milliseconds(seconds: float) -> str:
    """Return '98.1'."""
    return three_digits(1e3 * seconds)
