"""Numbers in a readable form."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from commhooks import units
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.results.intervals import Estimate, Interval
from commhooks.units import three_digits

NEVER = "—"
UNLIMITED = "unlimited"
_LINKS = {"emulated": "an emulated link", "hosts": "network namespaces linked", "real": "the real network"}


def seconds_in_words(seconds: float | None) -> str:
    """Return '65.2 s' or '98.1 ms'; a dash for never."""
    return NEVER if seconds is None else units.seconds_in_words(seconds)


def times(factor: float) -> str:
    """Return '7.12×', or 'nothing moved' for a hook that does not communicate."""
    return "nothing moved" if factor == float("inf") else f"{three_digits(factor)}×"


def percent(share: float) -> str:
    """Return '97.5 %'."""
    return f"{100 * share:.1f} %"


def signed(value: float, form: str = ".3f") -> str:
    """Return '+0.012' or '-0.012', and no sign before a zero."""
    text = f"{value:{form}}"
    return f"{0:{form}}" if float(text) == 0 else f"{value:+{form}}"


def bounds(interval: Interval | None, form: Callable[[float], str]) -> str:
    """Return '2.11 to 2.14'; nothing without an interval."""
    return "" if interval is None else f"{form(interval.low)} to {form(interval.high)}"


def spread_of(found: Estimate, form: Callable[[float], str]) -> str:
    """Return the interval, '2.11 to 2.14'; of two seeds their values, '2.11 and 2.14'; nothing for one seed."""
    if found.seeds == 2:
        return listed([form(value) for _, value in sorted(found.by_seed.items())])
    return bounds(found.interval, form)


def listed(names: Collection[str], last: str = "and") -> str:
    """Return 'one', 'one and two' or 'one, two and three'."""
    *before, end = names
    return f"{', '.join(before)} {last} {end}" if before else end


def pieces(text: str) -> list[str]:
    """Return the parts of a name between which a line may break: 'powersgd:', 'rank=4,', 'start_after=5'."""
    return re.split(r"(?<=[:, ])(?=\S)", text)


def folded(text: str, width: int) -> str:
    """Return the text in lines of at most this width, if its pieces are not longer."""
    lines = [""]
    for piece in pieces(text):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def shortened(text: str, length: int) -> str:
    """Return the text, without its middle if it is longer than that."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def link_in_words(link: LinkSettings) -> str:
    """Return 'an emulated link of 100 Mbit/s, latency 0.2 ms'."""
    if link.kind == "real":
        return _LINKS["real"]
    rate, more = rate_and_more(link)
    joint = "without a limit" if rate == UNLIMITED else f"{'at' if link.kind == 'hosts' else 'of'} {rate}"
    return f"{_LINKS[link.kind]} {joint}{f', {more}' if more else ''}"


def rate_and_more(link: LinkSettings) -> tuple[str, str]:
    """Return '100 Mbit/s' and 'latency 0.2 ms', or nothing if there is no more to say."""
    text = rate_in_words(link)
    if link.slowest is None:
        return UNLIMITED, text.removeprefix(UNLIMITED).removeprefix(", ")
    rate, _, more = text.partition(", ")
    return rate, more


def rate_in_words(link: LinkSettings) -> str:
    """Return the link without its kind: '100 Mbit/s, latency 0.2 ms'."""
    text = UNLIMITED if link.label == link.kind else link.label.removeprefix(f"{link.kind}:").removeprefix("rate=")
    text = re.sub(r"(\d)([kMGT]?(?:bit|B)/s|[mun]?s\b)", r"\1 \2", text)
    return text.replace("=", " ").replace(",", ", ")


def range_of_seconds(middle: float, low: float, high: float) -> str:
    """Return 'low to high' in the unit used for the value between them: '95.0 to 104'."""
    scale = 1.0 if middle >= 1 else 1e3
    return f"{three_digits(low * scale)} to {three_digits(high * scale)}"
