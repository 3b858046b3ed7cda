"""Fragments of a model: sets of parameters that are sent together."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.exchange.options import is_whole

Arrangement = Literal["strided", "sequential", "even"]
"""The ways of making fragments: layer i goes to fragment i modulo their number; or layers are cut into runs of about
equal size; or parameters are dealt out, so that sizes are about equal."""


def cut(
    named: Mapping[str, Tensor], fragments: int | Sequence[str | Sequence[str]], arrangement: Arrangement
) -> list[list[str]]:
    """Return the names of each fragment's parameters; raise `SettingsError` if these cannot be cut as asked.

    A number cuts between layers, which are the modules numbered by the first number in a name ("blocks.3"), or the
    module of a parameter without one; if there are fewer layers than fragments, it cuts between parameters. Otherwise
    each fragment is given by shell patterns; every parameter's name must match exactly one fragment's.

    "even" deals out parameters, the largest first, each to the fragment that has the fewest elements so far. Fragments
    cut between layers differ by up to a layer, these by at most one parameter.
    """
    if arrangement not in get_args(Arrangement):
        options = ", ".join(get_args(Arrangement))
        raise SettingsError(f"DiLoCo(arrangement={arrangement!r}): arrangement must be one of {options}.")
    if not is_whole(fragments):
        return _matched(named, _patterns(fragments))
    if not 1 <= fragments <= len(named):
        raise SettingsError(
            f"DiLoCo(fragments={fragments}): fragments must be at least 1, and at most as many as the trained "
            f"parameters, {len(named)}."
        )
    if arrangement == "even":
        return _even({name: parameter.numel() for name, parameter in named.items()}, fragments)
    layers: dict[str, list[str]] = {}
    for name in named:
        layers.setdefault(_layer_of(name), []).append(name)
    in_order = list(layers.values()) if len(layers) >= fragments else [[name] for name in named]
    if arrangement == "strided":
        return [[name for layer in in_order[first::fragments] for name in layer] for first in range(fragments)]
    return _runs(in_order, [sum(named[name].numel() for name in layer) for layer in in_order], fragments)


def _patterns(fragments: Any) -> list[list[str]]:
    listed = isinstance(fragments, Sequence) and not isinstance(fragments, str)
    parts: list[Any] = [[one] if isinstance(one, str) else one for one in fragments] if listed else [None]
    if not all(isinstance(part, Sequence) and all(isinstance(one, str) for one in part) for part in parts):
        raise SettingsError(
            f"DiLoCo(fragments={fragments!r}): fragments must be an int or shell patterns, one or a list of them for "
            "each fragment."
        )
    return [list(part) for part in parts]


def _layer_of(name: str) -> str:
    *modules, _ = name.split(".")
    numbers = [place for place, part in enumerate(modules) if part.isdecimal()]
    return ".".join(modules[: numbers[0] + 1] if numbers else modules)


def _even(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Deal out names, the largest size first, each to the part with the smallest sum; parts keep the given order."""
    place: dict[str, int] = {}
    filled = [(0, 0)] * count  # elements and names of each part
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        place[name] = number = filled.index(min(filled))
        elements, names = filled[number]
        filled[number] = elements + sizes[name], names + 1
    return [[name for name in sizes if place[name] == number] for number in range(count)]


def _runs(layers: Sequence[list[str]], sizes: Sequence[int], count: int) -> list[list[str]]:
    """Divide layers into runs; each ends as close as possible to its share of the remaining size."""
    runs: list[list[str]] = []
    begin = 0
    for number in range(count):
        left = count - number
        share, taken, end = sum(sizes[begin:]) / left, sizes[begin], begin + 1
        while left > 1 and end <= len(layers) - left and abs(taken + sizes[end] - share) <= abs(taken - share):
            taken, end = taken + sizes[end], end + 1
        end = len(layers) if left == 1 else end
        runs.append([name for layer in layers[begin:end] for name in layer])
        begin = end
    return runs


def _matched(named: Mapping[str, Tensor], patterns: Sequence[Sequence[str]]) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in patterns]
    for name in named:
        of_name = [number for number, own in enumerate(patterns) if any(fnmatch.fnmatchcase(name, one) for one in own)]
        if len(of_name) != 1:
            which = " and ".join(str(patterns[number]) for number in of_name)
            wrong = f"matches the patterns of {len(of_name)} fragments, {which}" if of_name else "matches no pattern"
            raise SettingsError(f"DiLoCo(fragments=...): {name!r} {wrong}; every parameter belongs to one fragment.")
        found[of_name[0]].append(name)
    for own, names in zip(patterns, found, strict=True):
        if not names:
            raise SettingsError(
                f"DiLoCo(fragments=...): {own} must match a parameter; there are {', '.join(list(named)[:8])}."
            )
    return found


def turns(fragments: int, every: int) -> list[int]:
    """Return the step of each fragment's turn in a round, from 1 to `every`: evenly spaced, the last one `every`."""
    return [math.floor((number + 1) * every / fragments) for number in range(fragments)]
