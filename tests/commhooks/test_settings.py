"""Settings: what a field says of itself is what is refused, for every compressor and codec that there is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import pytest
import torch

import commhooks
from commhooks import (
    AllReduceMean,
    Cast,
    Codec,
    Compressor,
    ErrorFeedback,
    Hierarchical,
    Int8,
    Match,
    PerParameter,
    SettingsError,
    StartAfter,
    TwoHop,
    WireDtype,
)
from commhooks.language.settings import setting

GIVEN: dict[str, Any] = {
    "inner": commhooks.TopK(),
    "codec": Int8(),
    "dtype": torch.float16,
    "rules": (("*", AllReduceMean()),),
    "steps": 3,
    "size": 2,
    "threshold": 0.1,
}
"""What a class must be given that has no default for it."""
CLASSES = sorted(
    (
        one
        for one in vars(commhooks).values()
        if isinstance(one, type) and issubclass(one, (Compressor, Codec, Match)) and dataclasses.is_dataclass(one)
        if not getattr(one, "__abstractmethods__", None)
    ),
    key=lambda one: one.__name__,
)


def made(kind: type, **settings: Any) -> Any:
    """Return an instance, of a wrapper around something that it takes."""
    needed = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    given = {name: value for name, value in GIVEN.items() if name in needed}
    if kind is WireDtype:
        given["inner"] = AllReduceMean()
    return kind(**(given | settings))


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A value that a field must refuse, and the nearest that it takes."""

    kind: type
    name: str
    value: Any
    fine: Any

    def __str__(self) -> str:
        return f"{self.kind.__name__}({self.name}={self.value!r})"


def wrong_values() -> list[Wrong]:
    """Return, for each bound of each field, a value just outside, and what no number is."""
    found = []
    for kind in CLASSES:
        for field in dataclasses.fields(kind):
            bounds = field.metadata.get("bounds")
            if bounds is None:
                continue
            is_whole = str(field.type).startswith("int")
            step = 1 if is_whole else 1e-6
            fine = getattr(made(kind), field.name)
            ends = [bounds.above, None if bounds.least is None else bounds.least - step, bounds.below]
            ends += [None if bounds.most is None else bounds.most + step, math.nan, "1", True]
            found += [Wrong(kind, field.name, value, fine) for value in ends if value is not None]
    return found


@pytest.mark.parametrize("wrong", wrong_values(), ids=str)
def test_a_number_out_of_its_bounds_is_refused_by_name_and_value(wrong: Wrong) -> None:
    with pytest.raises(SettingsError) as told:
        made(wrong.kind, **{wrong.name: wrong.value})
    assert str(told.value).startswith(f"{wrong.kind.__name__}({wrong.name}={wrong.value!r}): {wrong.name} must be ")
    assert getattr(made(wrong.kind, **{wrong.name: wrong.fine}), wrong.name) == wrong.fine


def test_every_class_has_settings_that_are_looked_at() -> None:
    assert len(CLASSES) >= 30 and len(wrong_values()) >= 150


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounded(AllReduceMean):
    """Fields of every form."""

    among: Literal["a", "b"] = "a"
    either: int | None = setting(None, least=1)
    is_on: bool = False
    ratio: float = setting(0.5, above=0, most=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Closer(Bounded):
    """Another default, which keeps the bounds."""

    ratio: float = 0.25
    size: int = setting(2, least=2, most=7)
    long: float = setting(0.0, least=0)


REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (Bounded, {"among": "c"}, r"Bounded\(among='c'\): among must be one of a, b\."),
    (Bounded, {"either": 0.5}, r"Bounded\(either=0.5\): either must be an integer of at least 1, or None\."),
    (Bounded, {"either": "1"}, r"either must be an integer of at least 1, or None\."),
    (Bounded, {"is_on": 1}, r"Bounded\(is_on=1\): is_on must be a bool\."),
    (Bounded, {"ratio": 0}, r"Bounded\(ratio=0\): ratio must be in \(0, 1\]\."),
    (Bounded, {"ratio": torch.tensor(0.5)}, r"ratio must be in \(0, 1\]\."),
    (Closer, {"ratio": 1.5}, r"Closer\(ratio=1.5\): ratio must be in \(0, 1\]\."),
    (Closer, {"size": 8}, r"Closer\(size=8\): size must be an integer from 2 to 7\."),
    (Closer, {"long": -1}, r"Closer\(long=-1\): long must be 0 or more\."),
    (Closer, {"long": None}, r"Closer\(long=None\): long must be 0 or more\."),
    (TwoHop, {"codec": "sign"}, r"TwoHop\(codec='sign'\): codec must be a Codec, such as Sign\(\)\."),
    (ErrorFeedback, {"inner": "top-k"}, r"inner must be a Compressor; make one from a name with make_compressor\."),
    (StartAfter, {"inner": AllReduceMean(), "steps": 1, "before": None}, r"before must be a Compressor"),
    (Hierarchical, {"inner": AllReduceMean(), "size": 0}, r"size must be an integer of at least 1\."),
    (Match, {"dtype": "fp16"}, r"Match\(dtype='fp16'\): dtype must be a torch.dtype, or None\."),
    (Match, {"dimensions": [2]}, r"dimensions must be a tuple of ints\."),
    (Match, {"min_elements": 5, "max_elements": 4}, r"max_elements must be at least min_elements=5\."),
    (Match, {"name": 3}, r"Match\(name=3\): name must be a str\."),
    (PerParameter, {"rules": (("*", AllReduceMean()),), "otherwise": "fp16"}, "otherwise must be a Compressor"),
    (Cast, {"dtype": torch.int8}, "dtype must be a floating-point torch.dtype of at least 16 bits"),
    (commhooks.SparseLoCo, {"chunk": 4, "k": 17}, r"k must be at most chunk² = 16\."),
    (commhooks.DeMo, {"chunk": 4, "k": 17}, r"k must be at most chunk² = 16\."),
    (commhooks.AdaptiveRank, {"rank": 4, "max_rank": 3}, r"max_rank must be an integer of at least 4, which is rank\."),
    (commhooks.Sign, {"block": 12}, r"Sign\(block=12\): block must be a multiple of 8\."),
    (commhooks.Signum, {"block": 12}, r"block must be a multiple of 8\."),
    (commhooks.PowerSGD, {"skip": ("a",), "matrices": "whole-bucket"}, "skip must be empty if matrices='whole-bucket'"),
    (commhooks.PowerSGD, {"matrices": "any"}, "matrices must be one of first-dimension, most-square, whole-bucket"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED)
def test_what_cannot_work_is_refused_in_words(kind: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        kind(**settings)


def test_a_setting_without_a_default_must_be_given() -> None:
    with pytest.raises(TypeError, match="threshold"):
        commhooks.Threshold()


def test_a_whole_number_is_a_number() -> None:
    assert Closer(ratio=1).ratio == 1 and Closer(long=3).long == 3 and Closer(either=4).either == 4
