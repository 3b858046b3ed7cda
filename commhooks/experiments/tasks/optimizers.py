"""torch's optimizers by name, with settings: 'sgd:lr=0.1,momentum=0.9', 'adamw:lr=1e-3,betas=0.9+0.95'."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn

from commhooks.experiments.specs import SettingValue, Spec
from commhooks.units import unknown

_UNFIT = {"LBFGS": "its step computes the loss again", "SparseAdam": "it needs sparse gradients"}
_KINDS: dict[str, Any] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}


def make_optimizer(spec: Spec, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer of this name for all of the model's parameters.

    Several numbers in one setting are joined by plus signs, since a comma ends a setting: 'betas=0.9+0.95'.

    Raises:
        ValueError: There is no such optimizer, or it does not accept these settings.

    """
    if spec.name.lower() not in _KINDS:
        fit = [name for name, kind in _KINDS.items() if kind.__name__ not in _UNFIT]
        raise ValueError(unknown("optimizer", spec.name, fit))
    kind = _KINDS[spec.name.lower()]
    if kind.__name__ in _UNFIT:
        raise ValueError(f"optimizer {spec.label!r} cannot be used here: {_UNFIT[kind.__name__]}; use sgd or adamw")
    defaults = {name: one.default for name, one in inspect.signature(kind).parameters.items() if name != "params"}
    settings = {}
    for name, value in spec.settings:
        if name not in defaults:
            raise ValueError(f"optimizer {spec.label!r}: {unknown('setting', name, defaults)}")
        settings[name] = _checked(value, defaults[name], f"optimizer {spec.label!r}: {name}")
    try:
        return kind(model.parameters(), **settings)  # type: ignore[no-any-return]  # any of torch's classes
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"optimizer {spec.label!r}: {error}") from error


def _checked(value: SettingValue, default: object, where: str) -> object:
    """Return a setting's value in the form of its default; raise ValueError if it has another type."""
    if isinstance(default, tuple):
        try:
            numbers = tuple(float(part) for part in str(value).split("+"))
        except ValueError:
            numbers = ()
        if len(numbers) != len(default):
            example = "+".join(map(str, default))
            raise ValueError(f"{where} must be {len(default)} numbers joined by '+', such as {example} (got {value})")
        return numbers
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ValueError(f"{where} must be true or false (got {value})")
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    if is_number and (isinstance(value, bool | str) or not math.isfinite(value)):
        raise ValueError(f"{where} must be a finite number, such as {default:g} (got {value})")
    return value
