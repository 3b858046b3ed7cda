"""When a controller looks at the link, and when it moves to another compressor."""

from __future__ import annotations

import dataclasses
import math

from commhooks.errors import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveRule:
    """When the controller looks, and when it moves."""

    margin: float = 0.05
    """The part of a step that a move must be predicted to save. Higher: fewer moves."""
    tie: float = 0.02
    """Of rungs whose steps differ by no more than this part, the earliest on the ladder is used. Higher: a more exact
    compressor, if the ladder begins with those, at the cost of time."""
    visit: int = 3
    """Steps on each rung at first, and on a rung that was moved to, before it is judged; the first is not counted."""
    change: float = 0.1
    """The change of a step's waiting, as a part of the step, on which the link is probed. Lower: more probes. It
    doubles with every probe that leads to nothing, and goes back slowly."""
    look: int = 8
    """Steps between two probes while another rung would pay on a faster link. Lower: a faster link is used sooner."""
    idle_look: int = 64
    """Steps between two probes otherwise: they show what else has changed."""
    urgent: float = 1.5
    """A step that takes this many times as long as another rung would moves at once. A smaller difference must be seen
    in two successive steps."""
    regret: int = 16
    """A rung that is left for the one before within so many steps was a mistake, and is not moved to again for as many
    steps, then twice as many, and so on, unless the move is urgent."""

    def __post_init__(self) -> None:
        for name in ("margin", "change"):
            if not 0 < getattr(self, name) < 1:
                raise SettingsError(f"AdaptiveRule({name}={getattr(self, name)!r}): {name} must be in (0, 1).")
        if not 0 <= self.tie < self.margin:
            raise SettingsError(
                f"AdaptiveRule(tie={self.tie!r}, margin={self.margin!r}): tie must be at least 0 and below margin, or "
                "moves would undo each other."
            )
        for name, least in (("visit", 2), ("look", 1), ("idle_look", 1), ("regret", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise SettingsError(
                    f"AdaptiveRule({name}={value!r}): {name} must be a whole number of at least {least}."
                )
        if not 1 < self.urgent < math.inf:
            raise SettingsError(f"AdaptiveRule(urgent={self.urgent!r}): urgent must be above 1, and finite.")
