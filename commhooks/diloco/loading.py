"""Comparison of a saved state with a DiLoCo: everything is checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from commhooks.diloco.parts import Fragment, RoundPart
from commhooks.diloco.starting import Schedule
from commhooks.saving.form import Form, faults_of
from commhooks.saving.misfits import other_optimizer, other_tensors
from commhooks.saving.rules import LoadRules

SHARED: Form = {
    "step": int,
    "rounds": int,
    "dropped_rounds": int,
    "schedule": dict,
    "due": {str: {"at": int, "mean": {str: Tensor}, "ranks?": int}},
    "moments_due": {str: {"at": int, "mean": {str: Tensor}}},
    "outer": {str: Tensor},
    "outer_optimizer": {"param_groups": list, ...: Any},
    "outer_optimizer_class": str,
    ...: Any,
}
"""The form of DiLoCo's state, in addition to its exchangers' state."""


def misfits(
    shared: Mapping[str, Any], schedule: Schedule, parts: Sequence[RoundPart], optimizer: Optimizer, rules: LoadRules
) -> list[str]:
    """List every difference between a saved state and this run that would cause an error on loading."""
    if not shared:
        return ["it was saved with the state of an attachment, not of DiLoCo"]
    if faults := list(faults_of(shared, SHARED)):
        return [f"DiLoCo's state is damaged: {fault}" for fault in faults]
    saved, before = shared["outer_optimizer"], shared["outer_optimizer_class"]
    return [
        *_other_settings(shared["schedule"], schedule.as_dict(), rules),
        *other_optimizer("outer optimizer", before, saved["param_groups"], optimizer),
        *_other_parts(shared, parts),
    ]


def _other_settings(saved: Mapping[str, Any], now: Mapping[str, Any], rules: LoadRules) -> Iterator[str]:
    for name, value in now.items():
        if saved.get(name) != value and (name == "fragments" or rules.settings == "refuse"):
            remedy = "; pass settings='change'" * (name != "fragments")
            yield f"{name}: saved with {saved.get(name)!r}, now {value!r}{remedy}"


def _other_parts(shared: Mapping[str, Any], parts: Sequence[RoundPart]) -> Iterator[str]:
    """Compare the outer copies, and the means that were under way, which must be due later."""
    now = {name: outer for part in parts if isinstance(part, Fragment) for name, outer in part.outer.items()}
    yield from other_tensors("outer copies", shared["outer"], now)
    numbered = {str(number): part for number, part in enumerate(parts)}
    for number, due in shared["due"].items():
        if number not in numbered:
            yield f"means of part {number} were under way, and there are {len(parts)} parts"
            continue
        if due["at"] <= shared["step"]:
            yield f"a mean was due at step {due['at']}, which was over at step {shared['step']}"
        yield from other_tensors("means under way", due["mean"], numbered[number].like)
    for number, due in shared["moments_due"].items():
        if due["at"] <= shared["step"]:
            yield f"moments {number} were due at step {due['at']}, which was over at step {shared['step']}"
