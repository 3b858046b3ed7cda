"""The options --link, --rate and --latency."""

from __future__ import annotations

import math
from collections.abc import Sequence


def links_in(
    links: Sequence[str] | None, rates: Sequence[str] | None, latency: str | None, defaults: tuple[Sequence[str], str]
) -> list[str]:
    """Return the links in full: the given links, and one for each rate, with the latency.

    Args:
        links: Links in full.
        rates: Rates, each of one link.
        latency: The latency of each rate's link; None: the default.
        defaults: The rates, used if neither links nor rates are given, and the latency.

    Raises:
        ValueError: A latency is given with links in full alone, which have their own.

    """
    if links and not rates and latency is not None:
        raise ValueError(
            "--latency belongs to each --rate; a --link contains its own latency: write --link "
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
            f"link {text!r}: nothing is sent over it; its times are computed from one rate and one latency: write "
            "--link 1Gbit/s,latency=50us"
        )
    return link.bits_per_second or math.inf, link.latency_seconds
