"""The rule by which a controller looks at the link and moves to another compressor."""

from __future__ import annotations

import dataclasses
import math
from typing import Self

from commhooks.errors import SettingsError


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveRule:
    """The rule by which the controller looks at the link and moves to another compressor.

    Raises `SettingsError` for a value that cannot work, and for a setting of earlier versions.
    """

    margin: float = 0.05
    """The part of a step that a move must be predicted to save, in (0, 1). Higher: fewer moves."""
    look: int = 8
    """Steps between two probes while another rung would pay on a faster link, at least 1. Lower: a faster link is used
    sooner."""

    def __new__(cls, **settings: object) -> Self:
        """Raise `SettingsError` if the controller itself sees to one of these settings."""
        former = [name for name in settings if cls is AdaptiveRule and name in _FULL_RULE]
        if former:
            raise SettingsError(
                f"AdaptiveRule({former[0]}={settings[former[0]]!r}): {former[0]} is no longer a setting; leave it out. "
                "margin and look are; a saved controller goes on with the value that it was saved with."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_part(self, "margin")
        _check_whole(self, "look", least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullRule(AdaptiveRule):
    """A rule with what the controller itself sees to. It is saved whole, since earlier versions let users set all."""

    tie: float = 0.02
    """Among rungs whose steps differ by at most this fraction, the first on the ladder is used. Higher: a more exact
    compressor, if the ladder begins with exact ones, at the cost of time. At least 0 and below margin."""
    visit: int = 3
    """Steps on each rung at first, and on a rung that was moved to, before it is judged; the first is not counted."""
    change: float = 0.1
    """The change of a step's waiting, as a part of the step, on which the link is probed. Lower: more probes. It
    doubles with every probe that leads to nothing, and goes back slowly."""
    idle_look: int = 64
    """Steps between two probes while no rung would pay: they show what else has changed."""
    urgent: float = 1.5
    """A step that takes this many times as long as another rung would moves at once. A smaller difference must be seen
    in two successive steps."""
    regret: int = 16
    """A rung that is left within this many steps for the rung used before it was a mistake. It is banned for as many
    steps, and each further mistake doubles the ban; an urgent move ignores it."""

    @classmethod
    def of(cls, rule: AdaptiveRule) -> FullRule:
        """Add to a user's rule what the controller itself sees to; below a margin of 5 % ties are narrower."""
        return cls(**{"tie": min(cls.tie, 0.4 * rule.margin)} | vars(rule))

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_part(self, "change")
        if not 0 <= self.tie < self.margin:
            raise SettingsError(
                f"AdaptiveRule(tie={self.tie!r}, margin={self.margin!r}): tie must be at least 0 and below margin, or "
                "moves would undo each other."
            )
        for name, least in (("visit", 2), ("idle_look", 1), ("regret", 1)):
            _check_whole(self, name, least)
        if not 1 < self.urgent < math.inf:
            raise SettingsError(f"AdaptiveRule(urgent={self.urgent!r}): urgent must be above 1, and finite.")


_FULL_RULE = {field.name for field in dataclasses.fields(FullRule)} - {"margin", "look"}


def _check_part(rule: AdaptiveRule, name: str) -> None:
    value = getattr(rule, name)
    if not 0 < value < 1:
        raise SettingsError(f"AdaptiveRule({name}={value!r}): {name} must be in (0, 1).")


def _check_whole(rule: AdaptiveRule, name: str, least: int) -> None:
    value = getattr(rule, name)
    if type(value) is not int or value < least:
        raise SettingsError(f"AdaptiveRule({name}={value!r}): {name} must be a whole number of at least {least}.")
