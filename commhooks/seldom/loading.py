"""Comparison of a saved state with a DiLoCo: everything is checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from commhooks.seldom.parts import Fragment, Part
from commhooks.seldom.starting import Schedule
from commhooks.state.snapshot import LoadRules

SHARED = {"step", "rounds", "dropped_rounds", "schedule", "due", "outer", "outer_optimizer", "outer_optimizer_class"}
"""Keys of DiLoCo's state, in addition to its exchangers' state."""


def misfits(
    shared: Mapping[str, Any], schedule: Schedule, parts: Sequence[Part], optimizer: Optimizer, rules: LoadRules
) -> list[str]:
    """List every difference between a saved state and this run that would cause an error on loading."""
    if lost := SHARED - shared.keys():
        return [f"DiLoCo's state has no {', '.join(sorted(lost))}"]
    try:
        return [
            *_other_settings(shared["schedule"], schedule.as_dict(), rules),
            *_other_optimizer(shared, optimizer),
            *_other_tensors(shared, parts),
        ]
    except Exception as error:  # whatever damaged data cause: the other ranks are waiting for an answer
        return [f"DiLoCo's state is damaged ({type(error).__name__}: {error})"]


def _other_settings(saved: Mapping[str, Any], now: Mapping[str, Any], rules: LoadRules) -> Iterator[str]:
    for name, value in now.items():
        if saved.get(name) != value and (name == "fragments" or rules.settings == "refuse"):
            yield f"{name}: saved with {saved.get(name)!r}, now {value!r}" + "; pass settings='change'" * (
                name != "fragments"
            )


def _other_optimizer(shared: Mapping[str, Any], optimizer: Optimizer) -> Iterator[str]:
    before, now = shared["outer_optimizer_class"], type(optimizer).__name__
    if before != now:
        yield f"outer optimizer: saved from {before}, now {now}"
    saved = shared["outer_optimizer"]["param_groups"]
    then, here = ([len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups))
    if then != here:
        yield f"outer optimizer: saved with groups of {then} parameters, now {here}"


def _other_tensors(shared: Mapping[str, Any], parts: Sequence[Part]) -> Iterator[str]:
    """Compare the shapes of outer copies, and of means that were under way, which must be due later."""
    for part in parts:
        if isinstance(part, Fragment):
            yield from _other_shapes("the outer copy", shared["outer"], part.outer)
    step: int = shared["step"]
    for number, due in shared["due"].items():
        if not due["at"] > step:
            yield f"a mean was due at step {due['at']}, which was over at step {step}"
        yield from _other_shapes("the mean", due["mean"], parts[int(number)].like)


def _other_shapes(what: str, saved: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in now.items():
        if name not in saved:
            yield f"{what} of {name!r} is missing"
        elif saved[name].shape != tensor.shape:
            yield f"{what} of {name!r} was saved with shape {tuple(saved[name].shape)}, now {tuple(tensor.shape)}"
