"""Descriptions of disagreements: the differences between ranks' fingerprints, and nothing else.

A fingerprint has one fact per line, "what: value". A value that is written as a call, such as a compressor, is compared
setting by setting.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)
Facts = dict[tuple[str, ...], str]
"""The values, by name. The name of a setting is the path to it, such as ("compressor", "inner", "rank")."""

_DIFFERENCES_TO_NAME = 8
_RANKS_TO_NAME = 8
_REFUSAL = "refusal: "


def refusal_as_fingerprint(reason: Exception) -> str:
    """Return the fingerprint of a rank that cannot take part; it equals no other rank's."""
    return _REFUSAL + " ".join(str(reason).split())


def describe(fingerprints: Sequence[str]) -> str:
    """Return a sentence on the differences between fingerprints, of which at least two differ, with their ranks."""
    refusals = [
        f"{_ranks([rank])} cannot take part: {text.splitlines()[0].removeprefix(_REFUSAL)}"
        for rank, text in enumerate(fingerprints)
        if text.startswith(_REFUSAL)
    ]
    if refusals:
        return _some(refusals)
    facts = [_facts_in(text) for text in fingerprints]
    names = dict.fromkeys(name for own in facts for name in own)
    different = {name for name in names if len({own.get(name) for own in facts}) > 1}
    # If compressors are of different classes, the classes are enough: their settings cannot be compared.
    outermost = [
        name for name in names if name in different and not any(name[:end] in different for end in range(1, len(name)))
    ]
    if outermost:
        values = [(".".join(name), [own.get(name, "missing") for own in facts]) for name in outermost]
        return _some([f"{name}: {_by_value(of_ranks)}" for name, of_ranks in values])
    orders = next((names for names in zip(*facts, strict=True) if len(set(names)) > 1), None)
    assert orders is not None, "fingerprints that differ have different facts, or the same in another order"
    return f"the order, which first differs at {_by_value(['.'.join(name) for name in orders])}."


def _facts_in(fingerprint: str) -> Facts:
    facts: Facts = {}
    for line in filter(None, fingerprint.split("\n")):
        what, _, value = line.partition(": ")
        facts |= {(what, *path): text for path, text in _settings_in(value)}
    return facts


def _settings_in(value: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every setting of a compressor, given as printed, with the path to it; yield any other value unchanged."""
    try:
        tree = ast.parse(value, mode="eval").body
    except (SyntaxError, ValueError):  # a user's own class may print anything
        tree = None
    if isinstance(tree, ast.Call) and value.startswith(f"{ast.unparse(tree.func)}("):  # not "shape (2,)"
        yield from _settings_of(tree)
    else:
        yield (), value


def _settings_of(node: ast.expr) -> Iterator[tuple[tuple[str, ...], str]]:
    inside: list[tuple[str, ast.expr]] = []
    if isinstance(node, ast.Call):
        yield (), ast.unparse(node.func)
        inside = [(str(n), one) for n, one in enumerate(node.args)]
        inside += [(keyword.arg or "**", keyword.value) for keyword in node.keywords]
    elif isinstance(node, ast.Tuple | ast.List) and any(isinstance(one, ast.Call) for one in ast.walk(node)):
        yield (), f"length {len(node.elts)}"
        inside = [(str(n), one) for n, one in enumerate(node.elts)]
    else:
        yield (), ast.unparse(node)
    for name, one in inside:
        for path, text in _settings_of(one):
            yield (name, *path), text


def _by_value(values: Sequence[str]) -> str:
    """Return each value with its ranks: "1 (ranks 0, 2), 4 (rank 1)"."""
    return ", ".join(f"{value} ({ranks})" for value, ranks in ranks_by(values).items())


def ranks_by(values: Sequence[Value]) -> dict[Value, str]:
    """Return the ranks that have each value, in words: {1: "ranks 0, 2", 4: "rank 1"}."""
    ranks: dict[Value, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return {value: _ranks(those) for value, those in ranks.items()}


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _RANKS_TO_NAME} more" if len(ranks) > _RANKS_TO_NAME else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_RANKS_TO_NAME]))}{more}"


def _some(differences: Sequence[str]) -> str:
    left_out = len(differences) - _DIFFERENCES_TO_NAME
    more = f"; and {left_out} more" if left_out > 0 else ""
    return "; ".join(differences[:_DIFFERENCES_TO_NAME]) + more + "." * (not more and not differences[-1].endswith("."))
