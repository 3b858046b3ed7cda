"""Numbers and names in a readable form, as statistics, reports and errors print them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def three_digits(value: float) -> str:
    """Return the number with three significant digits, but at most two decimals."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def bytes_in_words(count: float) -> str:
    """Return '1.53 GB', '72.6 MB' or '412 kB': decimal units, three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{three_digits(count / size)} {unit}"
    return f"{count:.0f} B"


def seconds_in_words(seconds: float) -> str:
    """Return '65.2 s' or '98.1 ms'."""
    return f"{three_digits(seconds)} s" if seconds >= 1 else f"{three_digits(seconds * 1e3)} ms"


def counted(number: int, what: str) -> str:
    """Return '1 step' or '1,000 steps'."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def in_columns(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return one aligned line for each row of a label, an amount and a remark."""
    first, second = (max(len(row[place]) for row in rows) for place in (0, 1))
    return "\n".join(f"{what:{first}}  {much:>{second}}  {remark}".rstrip() for what, much, remark in rows)


def unknown(what: str, got: str, known: Iterable[str]) -> str:
    """Return an error message for a name that does not exist, with the names that do and the nearest of them."""
    names = sorted(known)
    near = difflib.get_close_matches(got, names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{what} {got!r} is not known: expected one of {', '.join(names)}{hint}"
