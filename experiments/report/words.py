"""Numbers in a readable form."""

from __future__ import annotations

from commhooks import units
from commhooks.units import three_digits

from ..summary import Spread, Summary

NEVER = "—"


def seconds_in_words(seconds: float | None) -> str:
    """Return '65.2 s' or '98.1 ms'; a dash for never."""
    return NEVER if seconds is None else units.seconds_in_words(seconds)


def quartiles_in_words(spread: Spread) -> str:
    """Return the quartiles in the unit used for the median: '95.0 to 104'."""
    scale = 1.0 if spread.median >= 1 else 1e3
    return f"{three_digits(spread.low * scale)} to {three_digits(spread.high * scale)}"


def spread_in_words(spread: Spread) -> str:
    """Return the median with its quartiles: '98.1 ms (95.0 to 104)'."""
    return f"{seconds_in_words(spread.median)} ({quartiles_in_words(spread)})"


def milliseconds(seconds: float) -> str:
    """Return the time in milliseconds, without the unit."""
    return three_digits(seconds * 1e3)


def times(factor: float) -> str:
    """Return '7.12×', or 'nothing moved' for a hook that does not communicate."""
    return "nothing moved" if factor == float("inf") else f"{three_digits(factor)}×"


def percent(share: float) -> str:
    """Return '97.5 %'."""
    return f"{100 * share:.1f} %"


def loss_change(summary: Summary, first: Summary) -> str:
    """Return how much higher the held-out loss is than the first hook's: '+1.8 %'."""
    change = round(100 * (summary.held_out_loss / first.held_out_loss - 1), 1) + 0.0  # no minus before a zero
    return "" if summary is first else f"{change:+.1f} %"


def whole(number: int | None) -> str:
    """Return the number, or a dash for never."""
    return NEVER if number is None else f"{number:,}"


def by_task(summaries: list[Summary]) -> dict[str, list[Summary]]:
    """Return the summaries of each task, in order; the first of each is the baseline for the others."""
    tasks: dict[str, list[Summary]] = {}
    for summary in summaries:
        tasks.setdefault(summary.task, []).append(summary)
    return tasks
