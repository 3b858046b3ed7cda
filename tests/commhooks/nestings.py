"""Random compressors, seeded: wrappers nested around the registry's, whatever can be built and attached.

What cannot be built raises `SettingsError`, and is drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from commhooks import (
    Compressor,
    ErrorFeedback,
    Hierarchical,
    Match,
    PerParameter,
    SettingsError,
    StartAfter,
    WireDtype,
    make_compressor,
    schedule,
)
from commhooks.compressors import COMPRESSORS, DeMo, Signum, TwoHop
from commhooks.language.compressor import check_compressor, compressors_in
from commhooks.making import settings_of

SHAPES: dict[str, tuple[int, ...]] = {
    "body.0.weight": (24, 18), "body.0.bias": (18,), "body.1.weight": (6, 4, 3, 3), "norm": (33,),
    "head.weight": (20, 31), "head.bias": (7,), "scale": (), "gate": (1, 1), "empty": (0, 3),
}  # fmt: skip
PATTERNS: tuple[str | Match, ...] = (
    "body.*", "*.weight", "*.bias", "head.*", "body.1.*", "norm", "[a-g]*",
    Match(min_elements=50), Match(max_elements=33), Match(dimensions=(2,)), Match(name="*.weight", dimensions=(2, 4)),
)  # fmt: skip
_DEPTH = 4

SETTINGS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "adaptive-rank": {"rank": (2, 3), "max_rank": (4, 5), "every": (2, 3), "rule": ("least-error", "accordion")},
    "affine": {"channel": (None, 16, 32)},
    "demo": {"k": (2, 8), "chunk": (8, 16)},
    "distro": {"k": (2, 4), "chunk": (8, 16)},
    "dgc": {"ratio": (0.1, 0.5), "momentum": (0.0, 0.9), "clip": (None, 2.0), "warm_up": (0, 2)},
    "powersgd": {
        "rank": (1, 2, 3), "alternating": (False, True), "iterations": (1, 2), "warm_start": (True, True, False),
        "matrices": ("first-dimension", "most-square", "whole-bucket"), "skip": ((), ("head.*",)),
    },
    "powersgd-unbiased": {"rank": (1, 2)},
    "random-block": {"ratio": (0.1, 0.5), "unbiased": (False, True)},
    "random-k": {"ratio": (0.1, 0.5), "unbiased": (False, True)},
    "signum": {"beta": (0.0, 0.9), "block": (8, 16)},
    "sparse-loco": {"k": (2, 8), "chunk": (8, 16)},
    "svd": {"rank": (1, 2)},
    "threshold": {"threshold": (0.5, 2.0), "capacity": (0.1, 0.5)},
    "top-k": {"ratio": (0.05, 0.2, 1.0), "indices": ("auto", "int32", "block-16", "bitmap")},
}  # fmt: skip
"""What is drawn for the settings of a name; a two-hop code has blocks of 8, 16 or 32."""
SETTINGS_OF_CODES = {"block": (8, 16, 32), "server_feedback": (True, True, False), "damping": (None, None, 0.5)}
NAMES = sorted(COMPRESSORS.keys() - {"noop"})  # whose ranks do not even agree


def drawn(draw: random.Random, tensors: Mapping[str, Tensor], world_size: int) -> Compressor:
    """Return a compressor that these ranks could attach to a model of these parameters."""
    while True:
        try:
            compressor = _nested(draw, draw.randint(1, _DEPTH))
            check_compressor("attach", compressor)
            compressor.check(tensors, world_size)
        except SettingsError:
            continue
        return compressor


def _nested(draw: random.Random, depth: int) -> Compressor:
    """Return a compressor nested at most this deep; what it holds is drawn again until it can be held."""
    if depth == 0:
        return _leaf(draw)
    wrap = draw.choice(_WRAPPERS)
    for _ in range(20):
        try:
            return wrap(draw, depth - 1)
        except SettingsError:
            continue
    return _leaf(draw)


def _leaf(draw: random.Random) -> Compressor:
    return drawn_by_name(draw, draw.choice(NAMES))


def drawn_by_name(draw: random.Random, name: str) -> Compressor:
    """Return a compressor of the registry with random settings, wrapped or not in error feedback."""
    known = SETTINGS.get(name, SETTINGS_OF_CODES if "server_feedback" in settings_of(name) else {})
    settings = {setting: draw.choice(values) for setting, values in known.items() if draw.random() < 0.7}
    if known is SETTINGS_OF_CODES:
        settings.setdefault("block", 8)
    settings = {setting: value for setting, value in settings.items() if value is not None}
    if name == "threshold":
        settings.setdefault("threshold", 1.0)
    return make_compressor(name, error_feedback=draw.choice((None, None, False)), **settings)


def _fed(draw: random.Random, depth: int) -> Compressor:
    return ErrorFeedback(inner=_nested(draw, depth), decay=draw.choice((1.0, 1.0, 0.9)))


def _cast(draw: random.Random, depth: int) -> Compressor:
    return WireDtype(inner=_nested(draw, depth), dtype=draw.choice((torch.float16, torch.bfloat16)))


def _started(draw: random.Random, depth: int) -> Compressor:
    return StartAfter(inner=_nested(draw, depth), before=_nested(draw, depth), steps=draw.randint(0, 6))


def _scheduled(draw: random.Random, depth: int) -> Compressor:
    steps = [0, *sorted(draw.sample(range(1, 7), draw.randint(1, 2)))]
    return schedule(*((step, _nested(draw, depth)) for step in steps))


def _side_by_side(draw: random.Random, depth: int) -> Compressor:
    patterns = draw.sample(PATTERNS, draw.randint(1, 3))
    return PerParameter(
        rules=tuple((pattern, _nested(draw, depth)) for pattern in patterns), otherwise=_nested(draw, depth)
    )


def _of_machines(draw: random.Random, depth: int) -> Compressor:
    return Hierarchical(inner=_nested(draw, depth), size=draw.choice((1, 2, 2, 4)))


_WRAPPERS: tuple[Callable[[random.Random, int], Compressor], ...] = (
    _fed, _fed, _cast, _started, _scheduled, _side_by_side, _side_by_side, _side_by_side, _of_machines, _of_machines,
)  # fmt: skip


def conserves(compressor: Compressor, name: str, parameter: Tensor, step: int, *, fed: bool = False) -> bool:
    """Return whether, of this parameter and in this step, all that is not sent stays in residuals and shares."""
    if isinstance(compressor, ErrorFeedback):
        return compressor.decay == 1 and conserves(compressor.inner, name, parameter, step, fed=True)
    if isinstance(compressor, StartAfter):
        active = compressor.before if step < compressor.steps else compressor.inner
        return conserves(active, name, parameter, step, fed=fed)
    if isinstance(compressor, PerParameter):
        return conserves(compressor._of(name, parameter), name, parameter, step, fed=fed)
    if isinstance(compressor, (Hierarchical, WireDtype)):
        return conserves(compressor.inner, name, parameter, step, fed=fed)
    loss = compressor.loss(name, parameter)
    if isinstance(compressor, Signum) or (loss is not None and not loss.is_kept):
        return False  # it remembers in its own way, or is right on average
    if isinstance(compressor, DeMo) and compressor.sign:
        return False
    if loss is None:
        return True
    return fed and (not isinstance(compressor, TwoHop) or compressor.server_feedback)


def every_one_in(compressor: Compressor) -> list[Compressor]:
    """Return a compressor and all that it holds."""
    inside = [one for value in vars(compressor).values() for one in compressors_in(value)]
    return [compressor, *(nested for one in inside for nested in every_one_in(one))]
