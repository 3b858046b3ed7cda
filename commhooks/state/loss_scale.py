"""Residuals are scaled like gradients, so they must be rescaled whenever the gradient scaler changes the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from commhooks.devices import runs_later, wait_for_copies
from commhooks.errors import SettingsError


class Scaler(Protocol):
    """The methods of `torch.amp.GradScaler` that are needed here."""

    def scale(self, outputs: Tensor) -> Tensor:
        """Return the outputs times the scale."""
        ...

    def get_scale(self) -> float:
        """Return the scale."""
        ...


class LossScale:
    """The scale of the next gradients, and the scale of the residuals."""

    def __init__(self) -> None:
        self._scaler: Scaler | None = None
        self._announced: float | None = None
        self._of_residuals: float | Tensor = 1.0

    def follow(self, scaler: Scaler) -> None:
        """Use a scaler's scale from now on."""
        if not callable(getattr(scaler, "get_scale", None)) or not callable(getattr(scaler, "scale", None)):
            raise SettingsError(f"scaler={scaler!r}: scaler must be a torch.amp.GradScaler.")
        self._scaler = scaler

    @property
    def has_scaler(self) -> bool:
        """True if a scaler provides the scale; it then unscales the gradients before the optimizer's step."""
        return self._scaler is not None

    def announce(self, scale: float) -> None:
        """Use this scale from the next step on; raise `SettingsError` if a scaler already provides it."""
        if self._scaler is not None:
            raise SettingsError(f"set_grad_scale({scale!r}): the attached scaler provides the scale.")
        if not 0 < scale < math.inf:
            raise SettingsError(f"set_grad_scale({scale!r}): the scale must be above 0, and finite.")
        self._announced = float(scale)

    def value(self) -> float:
        """Return the scale of the residuals."""
        return float(self._of_residuals)

    @property
    def of_gradients(self) -> float | Tensor:
        """The scale of the current step and of its residuals; a tensor if reading its value would mean waiting."""
        return self._of_residuals

    def load(self, scale: float) -> None:
        """Set the scale of residuals that were just loaded."""
        self._of_residuals = scale

    @torch.no_grad()
    def apply_to(self, find: Callable[[], Mapping[int, Sequence[Tensor]]], device: torch.device) -> None:
        """Rescale local state to the scale of the next gradients; `find` returns it by the power that it follows.

        If everything is on a GPU, the host does not wait for it: it does not know whether the scale has changed, so all
        is multiplied in every step, mostly by 1.
        """
        scale: float | Tensor = self._of_residuals if self._announced is None else self._announced
        if self._scaler is not None:  # a tensor if it is on a GPU, for which the host does not wait
            one = torch.ones((), dtype=torch.float32, device=device)
            scale = self._scaler.scale(one) if runs_later(one) else self._scaler.get_scale()
            if scale is one:  # the scaler is disabled
                scale = 1.0
        if not isinstance(scale, Tensor) and not self._changes_to(scale):
            return
        local = find()
        if isinstance(scale, Tensor) and any(not runs_later(kept) for tensors in local.values() for kept in tensors):
            assert self._scaler is not None
            scale = self._scaler.get_scale()
        if isinstance(scale, Tensor):
            ratio: float | Tensor = scale / self._of_residuals
        elif self._changes_to(scale):
            ratio = scale / self.value()
        else:
            return
        for power, tensors in local.items():
            wait_for_copies(tensors)
            torch._foreach_mul_(list(tensors), ratio**power)
        self._of_residuals = scale

    def _changes_to(self, scale: float) -> bool:
        return 0 < scale < math.inf and scale != self._of_residuals
