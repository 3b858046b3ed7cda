"""The outer optimizer: it trains the outer copies, with their mean differences from the ranks as gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from commhooks.communicators.beginning import agree
from commhooks.diloco.nesterov import Nesterov
from commhooks.errors import SettingsError
from commhooks.language.compressor import Compressor
from commhooks.language.text import Spelling, parse

Outer = Callable[[list[Tensor]], Optimizer]
"""A function that returns the outer optimizer of the given tensors."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterSGD:
    """SGD as the outer optimizer, with Nesterov momentum unless that is 0."""

    rate: float
    """The learning rate. 1 without momentum: the outer copies become the mean of the ranks' parameters."""
    momentum: float = 0.0
    """Higher: the direction of earlier rounds is followed for longer."""

    def __post_init__(self) -> None:
        if not _is_number(self.rate) or not 0 < self.rate < float("inf"):
            raise SettingsError(f"DiLoCo(outer='{self}'): rate must be above zero, and finite (got {self.rate!r}).")
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise SettingsError(f"DiLoCo(outer='{self}'): momentum must be in [0, 1) (got {self.momentum!r}).")

    def __call__(self, parameters: list[Tensor]) -> Optimizer:
        """Return the optimizer."""
        return Nesterov(parameters, lr=self.rate, momentum=self.momentum)

    def __str__(self) -> str:
        return next(
            (name for name, one in NAMED.items() if one == self), str(Spelling("sgd", tuple(vars(self).items())))
        )


NAMED = {"average": OuterSGD(rate=1.0), "published": OuterSGD(rate=0.7, momentum=0.9)}
"""Outer optimizers by name: the mean of the ranks' parameters, and that of DiLoCo's paper, for rounds of 500 steps."""
LONGEST = 100
"""The longest rounds, in steps, for which "average" was measured to be best (docs/reproductions/diloco-recipes.md)."""


def outer_of(outer: Outer | str, compressor: Compressor, every: int) -> Outer:
    """Return the outer optimizer that a text names, such as "sgd:rate=0.7,momentum=0.9"; anything else as it is.

    "auto" is "average" in rounds of up to `LONGEST` steps, where it was best for every compressor of the study, and
    with SparseLoCo, whose paper has no outer momentum either; in longer rounds it is "published".
    """
    if not isinstance(outer, str):
        return outer
    spelling = parse(outer, "outer")
    if spelling.name == "auto" and not spelling.settings:
        is_average = every <= LONGEST or parse(str(compressor)).name == "sparse-loco"
        return NAMED["average" if is_average else "published"]
    if spelling.name in NAMED and not spelling.settings:
        return NAMED[spelling.name]
    if spelling.name == "sgd" and spelling.has("rate") and dict(spelling.settings).keys() <= {"rate", "momentum"}:
        return OuterSGD(**dict(spelling.settings))
    raise SettingsError(
        f"DiLoCo(outer={outer!r}): expected auto, {', '.join(NAMED)}, 'sgd:rate=0.7,momentum=0.9', or a function that "
        "makes an optimizer of the tensors that it is given."
    )


def made_of(outer: Outer, copies: list[Tensor], group: dist.ProcessGroup | None) -> Optimizer:
    """Return the optimizer that `outer` makes of the outer copies; raise `SettingsError` on every rank if it cannot.

    Raise it also if that is not an optimizer of exactly these tensors, or if ranks differ in its class or options.
    """
    made: object = None
    refusal = ""
    try:
        made = outer(copies)
    except Exception as error:  # whatever it is, the other ranks are waiting for an answer
        refusal = f"outer raised {type(error).__name__}: {error}"
    if not refusal and not isinstance(made, Optimizer):
        refusal = f"outer must return a torch.optim.Optimizer (got {type(made).__name__})."
    groups = made.param_groups if isinstance(made, Optimizer) else []
    if not refusal and {id(one) for options in groups for one in options["params"]} != set(map(id, copies)):
        refusal = "outer must return an optimizer of the tensors that it is given."
    options = [{name: value for name, value in one.items() if name != "params"} for one in groups]
    described = f"outer optimizer: {type(made).__name__} with {options}"
    agree("DiLoCo", group, SettingsError(f"DiLoCo: {refusal}") if refusal else described)
    assert isinstance(made, Optimizer), "anything else was refused"
    return made
