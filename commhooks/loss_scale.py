"""Residuals are in units of the gradients, and those in units of the loss scale, which a gradient scaler changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from commhooks.errors import SettingsError


class Scaler(Protocol):
    """Be a `torch.amp.GradScaler`, as far as it is needed here."""

    def scale(self, outputs: Tensor) -> Tensor:
        """Return the outputs times the scale."""
        ...

    def get_scale(self) -> float:
        """Return the scale."""
        ...


class LossScale:
    """Know the scale that the next gradients come in, and the one that residuals are in."""

    def __init__(self) -> None:
        self._scaler: Scaler | None = None
        self._announced: float | None = None
        self._of_residuals: float | Tensor = 1.0

    def follow(self, scaler: Scaler) -> None:
        """Take the scale from a scaler from now on."""
        if not callable(getattr(scaler, "get_scale", None)) or not callable(getattr(scaler, "scale", None)):
            raise SettingsError(f"scaler={scaler!r}: scaler must be a torch.amp.GradScaler.")
        self._scaler = scaler

    def announce(self, scale: float) -> None:
        """Take the scale as said, from the next step on; raise `SettingsError` where a scaler says it."""
        if self._scaler is not None:
            raise SettingsError(f"set_grad_scale({scale!r}): the scale is that of the scaler that was handed over.")
        if not 0 < scale < math.inf:
            raise SettingsError(f"set_grad_scale({scale!r}): the scale must be above 0, and finite.")
        self._announced = float(scale)

    def value(self) -> float:
        """Return the scale that residuals are in."""
        return float(self._of_residuals)

    def load(self, scale: float) -> None:
        """Say that residuals which were just loaded are in this scale."""
        self._of_residuals = scale

    @torch.no_grad()
    def apply_to(self, residuals: Sequence[Tensor], device: torch.device) -> None:
        """Bring residuals to the scale of the coming gradients; on a GPU without waiting for it."""
        scale = self._coming(device, wait=device.type != "cuda" or any(not kept.is_cuda for kept in residuals))
        if isinstance(scale, Tensor):
            ratio = scale / self._of_residuals
            if residuals:
                torch._foreach_mul_(list(residuals), ratio)
        elif not 0 < scale < math.inf or scale == self._of_residuals:
            return
        elif residuals:
            torch._foreach_mul_(list(residuals), scale / self.value())
        self._of_residuals = scale

    def _coming(self, device: torch.device, *, wait: bool) -> float | Tensor:
        if self._scaler is None:
            return self._of_residuals if self._announced is None else self._announced
        return self._scaler.get_scale() if wait else self._scaler.scale(torch.ones((), device=device))
