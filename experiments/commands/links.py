"""The options --link, --rate and --latency."""

from __future__ import annotations

import math
from collections.abc import Sequence


def links_in(
    links: Sequence[str] | None, rates: Sequence[str] | None, latency: str | None, defaults: tuple[Sequence[str], str]
) -> list[str]:
    """Return the links in full: those given so, and one for each rate, with the latency.

    Args:
        links: Links in full.
        rates: Rates, each of a link.
        latency: That of each rate.
        defaults: The rates, if there is no link either, and the latency.

    Raises:
        ValueError: A latency is given, and no rate that could have it.

    """
    if links and not rates and latency is not None:
        raise ValueError(
            "--latency is that of each --rate; that of a --link is part of it: write --link "
            f"{links[0]},latency={latency}"
        )
    if not links and not rates:
        rates = defaults[0]
    latency = defaults[1] if latency is None else latency
    return [*(links or []), *(f"{rate},latency={latency}" for rate in rates or [])]


def constant_link(text: str) -> tuple[float, float]:
    """Return the rate (bits per second, or inf) and the latency (seconds) of a link over which steps are computed.

    Raises:
        ValueError: The text does not parse, or says more than a rate and a latency.

    """
    from ..links.link import LinkSettings

    link = LinkSettings.parse(text)
    if link != LinkSettings(bits_per_second=link.bits_per_second, latency_seconds=link.latency_seconds):
        raise ValueError(
            f"link {text!r}: nothing is sent over it, its times are computed from one rate and one latency: write "
            "--link 1Gbit/s,latency=50us"
        )
    return link.bits_per_second or math.inf, link.latency_seconds
