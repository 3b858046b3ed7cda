"""The outer optimizer: it trains the outer copies, with their mean differences from the ranks as gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from commhooks.communicators.beginning import agree
from commhooks.diloco.nesterov import Nesterov
from commhooks.errors import SettingsError

Outer = Callable[[list[Tensor]], Optimizer]
"""A function that returns the outer optimizer of the given tensors."""


def nesterov(parameters: list[Tensor]) -> Optimizer:
    """Return DiLoCo's outer optimizer: SGD with a rate of 0.7 and a Nesterov momentum of 0.9."""
    return Nesterov(parameters, lr=0.7, momentum=0.9)


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
