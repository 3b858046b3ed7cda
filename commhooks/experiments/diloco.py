"""DiLoCo in place of a hook: 'diloco:every=30,compressor=int4'."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from commhooks.experiments.specs import DILOCO, Spec, is_diloco
from commhooks.experiments.timing.rounds import Rounds
from commhooks.language.text import Spelling, parse
from commhooks.units import unknown

_UNCOMPRESSED = Spec("all-reduce")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCoSpec:
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
    outer: str = "auto"
    """The outer optimizer: average, published, or in parentheses sgd:rate=0.7,momentum=0.9; auto: by the rounds."""

    @classmethod
    def of(cls, hook: Spec) -> DiLoCoSpec:
        """Return the settings of a hook that `is_diloco`.

        Raises:
            ValueError: There is no such setting, `every` is missing, or a value is of the wrong type or cannot work.

        """
        given = dict(hook.settings)
        fields = (one for one in dataclasses.fields(cls) if one.name not in {"compressor", "outer"})
        kinds = {one.name: _KINDS[one.type] for one in fields}
        for name, value in given.items():
            if name not in {*kinds, "compressor", "outer"}:
                raise ValueError(f"hook {hook.label!r}: {unknown('setting', name, [*kinds, 'compressor'])}")
            if name in kinds and type(value) not in kinds[name]:
                raise ValueError(f"hook {hook.label!r}: {name} must be {_WORDS[kinds[name]]} (got {value!r})")
        if "every" not in given:
            raise ValueError(f"hook {hook.label!r}: say how many steps a round has, such as {DILOCO}:every=30")
        outer = given.get("outer", cls.outer)
        if not isinstance(outer, str | Spelling):
            raise ValueError(f"hook {hook.label!r}: outer must be a name, or settings in parentheses (got {outer!r})")
        compressor = _compressor(hook, given.get("compressor", cls.compressor))
        return cls(**given | {"compressor": compressor, "outer": str(outer)})

    @property
    def rounds(self) -> Rounds:
        """The rounds of communication, for the step-time model."""
        return Rounds(every=self.every, fragments=self.fragments, delay=self.delay)


def exchanged(hook: Spec) -> Spec:
    """Return the hook whose messages are sent: for DiLoCo, the compressor of its rounds."""
    return DiLoCoSpec.of(hook).compressor if is_diloco(hook) else hook


_KINDS: Mapping[Any, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "float": (int, float),
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
