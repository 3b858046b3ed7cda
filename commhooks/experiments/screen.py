"""A terminal that is shown text alone, whatever control characters the names in somebody else's file have."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # those of text direction, too


def visible(text: str) -> str:
    """Return the text with a mark in place of each control character but line breaks and tabs."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


class Screen(Console):
    """A console that prints styles of its own, and none that a text contains."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of what is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
