"""DiLoCo in place of a hook, 'diloco:every=30,compressor=int4', and the outer recipe of each compressor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from commhooks.language.text import Spelling, parse
from commhooks.units import unknown

from .specs import DILOCO, Spec, is_seldom
from .timing.rounds import Rounds

_UNCOMPRESSED = Spec("all-reduce")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An outer optimizer: SGD with this rate, and with Nesterov momentum unless that is 0."""

    rate: float
    momentum: float
    source: str
    """Its origin: a measurement, a paper, or the user."""

    def __str__(self) -> str:
        """Return rate, momentum and source in words."""
        momentum = f"Nesterov momentum {self.momentum:g}" if self.momentum else "no momentum"
        return f"rate {self.rate:g}, {momentum} ({self.source})"


_RUNS = "best of four recipes on gpt:size=small, 4 workers, 1,200 steps, every=30; and of two at 10 and 100"
RECIPES: Mapping[str, Recipe] = {
    "all-reduce": Recipe(1.0, 0.0, _RUNS),
    "int4": Recipe(1.0, 0.0, _RUNS),
    "codebook": Recipe(1.0, 0.0, _RUNS),
    "powersgd": Recipe(1.0, 0.0, f"{_RUNS}, at rank 4"),
    "sparse-loco": Recipe(1.0, 0.0, f"{_RUNS}; Sarfi et al., SparseLoCo, 2025, has no momentum either"),
}
"""Outer recipes by the name of the compressor, for specs that give none; from docs/reproductions/diloco-recipes.md."""
OTHERS = Recipe(1.0, 0.0, "not measured: the same as all above")
"""The outer recipe of compressors that `RECIPES` does not name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seldom:
    """DiLoCo: each rank trains its own model, and every `every` steps the ranks average their parameters' changes.

    It trains the plain module in place of a DistributedDataParallel; see `commhooks.DiLoCo`. It is written as
    'diloco:every=30,compressor=(powersgd:rank=4)'.
    """

    every: int
    """The number of steps in a round. Higher: fewer bytes, but the ranks' models differ more."""
    compressor: Spec = _UNCOMPRESSED
    """The compressor of the rounds: a name, or in parentheses a name with settings."""
    fragments: int = 1
    """The number of parts that are sent one after another in a round. Higher: smaller bursts."""
    arrangement: str = "strided"
    """The assignment of layers to fragments: strided, sequential or even."""
    delay: int = 0
    """The number of steps after which a mean is used. Higher: more time for the exchange, and older means."""
    mixing: float = 0.0
    """The weight of a rank's own parameters when mixed with the outer copy; 0: they become that, 1: they stay."""
    outer_rate: float | None = None
    """The outer optimizer's learning rate; none: the recipe's for this compressor."""
    outer_momentum: float | None = None
    """The outer optimizer's Nesterov momentum; none: the recipe's for this compressor."""

    @classmethod
    def of(cls, hook: Spec) -> Seldom:
        """Return the settings of a hook that `is_seldom`.

        Raises:
            ValueError: There is no such setting, `every` is missing, or a value is of the wrong type or cannot work.

        """
        given = dict(hook.settings)
        kinds = {one.name: _KINDS[one.type] for one in dataclasses.fields(cls) if one.type in _KINDS}
        for name, value in given.items():
            if name not in {*kinds, "compressor"}:
                raise ValueError(f"hook {hook.label!r}: {unknown('setting', name, [*kinds, 'compressor'])}")
            if name in kinds and type(value) not in kinds[name]:
                raise ValueError(f"hook {hook.label!r}: {name} must be {_WORDS[kinds[name]]} (got {value!r})")
        if "every" not in given:
            raise ValueError(f"hook {hook.label!r}: say how many steps a round has, such as {DILOCO}:every=30")
        made = cls(**given | {"compressor": _compressor(hook, given.get("compressor", cls.compressor))})
        rate, momentum = made.outer_rate, made.outer_momentum
        if rate is not None and not 0 < rate < float("inf"):
            raise ValueError(f"hook {hook.label!r}: outer_rate must be above zero, and finite (got {rate})")
        if momentum is not None and not 0 <= momentum < 1:
            raise ValueError(f"hook {hook.label!r}: outer_momentum must be in [0, 1) (got {momentum})")
        return made

    @property
    def recipe(self) -> Recipe:
        """The compressor's outer recipe, with `outer_rate` and `outer_momentum` in place of its own if given."""
        preset = RECIPES.get(self.compressor.name, OTHERS)
        if self.outer_rate is None and self.outer_momentum is None:
            return preset
        rate = preset.rate if self.outer_rate is None else self.outer_rate
        momentum = preset.momentum if self.outer_momentum is None else self.outer_momentum
        return Recipe(rate, momentum, "as asked for")

    @property
    def rounds(self) -> Rounds:
        """The rounds of communication, for the step-time model."""
        return Rounds(every=self.every, fragments=self.fragments, delay=self.delay)


def exchanged(hook: Spec) -> Spec:
    """Return the hook whose messages are sent: for DiLoCo, the compressor of its rounds."""
    return Seldom.of(hook).compressor if is_seldom(hook) else hook


_KINDS: Mapping[Any, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "float": (int, float),
    "float | None": (int, float),
}
_WORDS = {(int,): "a whole number", (str,): "text", (int, float): "a number"}


def _compressor(hook: Spec, value: object) -> Spec:
    """Return the compressor that a setting names."""
    found = parse(value) if isinstance(value, str) else value
    if not isinstance(found, Spelling):
        raise ValueError(
            f"hook {hook.label!r}: compressor must be a name, or a name with settings in parentheses, such as "
            f"(powersgd:rank=4) (got {value!r})"
        )
    if found.has("policy"):
        raise ValueError(
            f"hook {hook.label!r}: DiLoCo sends a fragment at a time, so policy has no effect; leave it out"
        )
    return Spec(found.name, found.settings)
