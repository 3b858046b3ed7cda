"""Turning a hook's name and settings into a compressor, before any process starts."""

from __future__ import annotations

import difflib
from typing import Any

import torch

import commhooks
from commhooks.language.compressor import Compressor
from commhooks.making import settings_of
from commhooks.scheduling.policy import POLICIES

from .specs import Spec

_DTYPES = {"fp16": torch.float16, "float16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}


def make_hook(spec: Spec, seed: int = 0) -> Compressor:
    """Return a fresh compressor for this hook; its random numbers follow the seed, unless it has its own.

    Raises ValueError if there is no hook of this name, if it has no such setting, or if a value cannot work.
    """
    settings: dict[str, Any] = dict(spec.settings)
    policy = settings.pop("policy", "fifo")
    if policy not in POLICIES:
        raise ValueError(f"hook {spec.label!r}: policy must be one of {', '.join(POLICIES)} (got {policy})")
    if "(" in spec.name:  # a whole compressor, as printed by `str`
        return commhooks.make_compressor(spec.name)
    known = settings_of(spec.name)
    for name in settings:
        if name not in known:
            raise ValueError(_unknown(spec, name, sorted({"policy", *known})))
    if "skip" in settings:  # names or patterns, separated by plus signs, since a comma ends a setting
        settings["skip"] = tuple(str(settings["skip"]).split("+"))
    if "wire" in settings:
        settings["wire"] = _dtype(spec, settings["wire"])
    if "seed" in known:
        settings.setdefault("seed", seed)
    return commhooks.make_compressor(spec.name, **settings)


def policy_of(spec: Spec) -> str:
    """Return the order of collectives that this hook requests."""
    return str(dict(spec.settings).get("policy", "fifo"))


def _unknown(spec: Spec, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"hook {spec.label!r}: {spec.name!r} has no setting {name!r}; it has {', '.join(known)}.{hint}"


def _dtype(spec: Spec, value: object) -> torch.dtype:
    if value not in _DTYPES:
        raise ValueError(f"hook {spec.label!r}: wire must be one of {', '.join(_DTYPES)} (got {value})")
    return _DTYPES[str(value)]
