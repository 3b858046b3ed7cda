"""Rates, latencies and links as text, read and written."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from commhooks.units import unknown

Schedule = tuple[tuple[float, float | None], ...]

DEFAULT_RATE, DEFAULT_LATENCY = "100Mbit/s", "0.2ms"
DEFAULT_LINK = f"{DEFAULT_RATE},latency={DEFAULT_LATENCY}"  # of commands and scripts; in a YAML file it is unlimited
LINK_KINDS = ("emulated", "hosts", "real")
_KEYS = ("rate", "down", "latency", "framing")
_QUANTITY = re.compile(r"\s*(?P<number>\d+\.?\d*|\.\d+)\s*(?P<prefix>[kKmMgGtT]?)(?P<unit>\S+)\s*")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_FACTORS = {prefix.lower(): factor for prefix, factor in _PREFIXES.items()}  # 'mbit' is often written for 'Mbit'
_BITS = {"bit/s", "bits/s", "bit", "bps", "b/s"}
_BYTES = {"Byte/s", "Bytes/s", "byte/s", "bytes/s", "Bps", "B/s"}
_RATES = {f"{prefix}bit/s": factor for prefix, factor in _PREFIXES.items()}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NO_LIMIT = {"unlimited", "none", "inf"}
_FORMS = "'100Mbit/s', '20Mbit/s,down=100Mbit/s,latency=5ms', '100Mbit/s+10Mbit/s@30s', 'hosts:100Mbit/s' or 'real'"


def parse_rate(text: str) -> float | None:
    """Return the bits per second in a text such as '100Mbit/s', '1.5 Gbps' or '12.5 MB/s'.

    'unlimited' is None. Units are decimal: 1 kbit is 1,000 bit. A small b is a bit, a capital B a byte.

    Raises:
        ValueError: The text is not a positive number followed by a unit of rate.

    """
    if text.strip().lower() in _NO_LIMIT:
        return None
    match = _QUANTITY.fullmatch(text)
    bits = _bits_of(match["unit"]) if match else None
    if match is None or bits is None:
        raise ValueError(
            f"rate {text!r} does not parse: expected a number and a unit, such as '100Mbit/s', '1.5 Gbps', '12.5 MB/s' "
            "or 'unlimited' (units are decimal; b is a bit, B a byte)"
        )
    rate = float(match["number"]) * _FACTORS[match["prefix"].lower()] * bits
    if rate <= 0:
        raise ValueError(f"rate {text!r} must be above zero; for a link without a limit write 'unlimited'")
    return rate


def parse_latency(text: str) -> float:
    """Return the seconds in a text such as '0.2ms', '50us', '1s' or '0'.

    Raises:
        ValueError: The text is not a number of at least zero followed by a unit of time.

    """
    return _seconds_in("latency", text)


def format_rate(bits_per_second: float | None) -> str:
    """Return the rate in a readable form: '100 Mbit/s'."""
    if bits_per_second is None or math.isinf(bits_per_second):
        return "unlimited"
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:g} {prefix}bit/s"
    return f"{bits_per_second:g} bit/s"


def fields_in(text: str) -> dict[str, Any]:
    """Return the fields of `LinkSettings` that a text such as 'hosts:rate=100Mbit/s' names.

    Raises:
        ValueError: The text does not have that form. The combination of fields is not checked here.

    """
    if not text.strip():
        raise ValueError(f"the link is an empty text; expected {_FORMS}, or 'unlimited'")
    head, colon, rest = text.strip().partition(":")
    kind, rest = (head.strip(), rest) if colon else (head, "") if head in LINK_KINDS else ("emulated", head)
    if kind not in LINK_KINDS:
        raise ValueError(f"link {text!r} does not parse: {unknown('kind', kind, LINK_KINDS)}")
    fields: dict[str, Any] = {"kind": kind}
    for key, value in _pairs_in(rest, text).items():
        if key == "rate":
            fields["bits_per_second"], fields["schedule"] = _rates_in(value)
        elif key == "down":
            fields["down_bits_per_second"] = parse_rate(value)
            if fields["down_bits_per_second"] is None:
                raise ValueError(
                    f"link {text!r} does not parse: a rank that receives without a limit is not modelled; leave out "
                    "down, which then equals the rate, or give it a rate that is high"
                )
        elif key == "latency":
            fields["latency_seconds"] = parse_latency(value)
        elif value in {"on", "off"}:
            fields["framing"] = value == "on"
        else:
            raise ValueError(f"link {text!r} does not parse: framing must be on or off (got {value!r})")
    return fields


def text_of(fields: Mapping[str, Any]) -> str:
    """Return the shortest text from which `fields_in` reads exactly these fields."""
    rate, schedule = fields["bits_per_second"], fields["schedule"]
    pieces = []
    if rate is not None or schedule:
        later = ("@".join((_exact_rate(then), _shortest(seconds, _SECONDS))) for seconds, then in schedule)
        pieces.append("+".join((_exact_rate(rate), *later)))
    if fields["down_bits_per_second"] is not None:
        pieces.append(f"down={_exact_rate(fields['down_bits_per_second'])}")
    if fields["latency_seconds"]:
        pieces.append(f"latency={_shortest(fields['latency_seconds'], _SECONDS)}")
    if not fields["framing"]:
        pieces.append("framing=off")
    if fields["kind"] == "emulated":
        return ",".join(pieces) or "unlimited"
    return ":".join(filter(None, (fields["kind"], ",".join(pieces))))


def _pairs_in(rest: str, text: str) -> dict[str, str]:
    """Return the keys and values in the text after the kind."""
    pairs: dict[str, str] = {}
    for position, piece in enumerate(rest.split(",") if rest.strip() else []):
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not equals and position == 0:
            key, value = "rate", key  # the rate may stand first, without its key
        if key not in _KEYS:
            raise ValueError(f"link {text!r} does not parse: {unknown('key', key, _KEYS)}")
        if key in pairs:
            raise ValueError(f"link {text!r} does not parse: {key} is given twice")
        pairs[key] = value
    return pairs


def _rates_in(text: str) -> tuple[float | None, Schedule]:
    """Return the first rate and the later ones of a text such as '100Mbit/s+10Mbit/s@30s'."""
    first, *later = text.split("+")
    schedule = []
    for piece in later:
        rate, at, seconds = piece.partition("@")
        if not at:
            raise ValueError(
                f"rate {text!r} does not parse: a rate that follows says when it begins, in seconds since the run "
                "began, as in '100Mbit/s+10Mbit/s@30s'"
            )
        schedule.append((_seconds_in("time", seconds), parse_rate(rate)))
    return parse_rate(first), tuple(schedule)


def _seconds_in(what: str, text: str) -> float:
    if text.strip() == "0":
        return 0.0
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(s|ms|us|µs|ns)\s*", text)
    if match is None:
        raise ValueError(
            f"{what} {text!r} does not parse: expected a number and a unit, such as '0.2ms', '50us', '1s' or '0'"
        )
    return float(match[1]) * _SECONDS[match[2]]


def _exact_rate(rate: float | None) -> str:
    """Return the shortest text from which `parse_rate` reads exactly this rate."""
    return "unlimited" if rate is None else _shortest(rate, _RATES)


def _shortest(value: float, units: Mapping[str, float]) -> str:
    """Return the shortest number and unit that stand for this value, to the last bit; one of the factors is 1."""
    texts = []
    for unit, factor in units.items():
        number = format(Decimal(repr(value / factor)), "f")  # without an exponent, which the parsers do not read
        number = number.rstrip("0").rstrip(".") if "." in number else number
        if float(number) * factor == value:
            texts.append(number + unit)
    return min(texts, key=len)


def _bits_of(unit: str) -> int | None:
    """Return the number of bits in this unit; None for an unknown unit."""
    if unit in _BYTES:
        return 8
    return 1 if unit in _BITS or unit.lower() in {"bit/s", "bits/s", "bit"} else None
