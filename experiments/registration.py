"""Putting a run's hook on its model, over the run's link, and what can be asked of it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

import commhooks

from .hooks import make_hook, policy_of
from .link import EmulatedLink
from .measure import WaitClock
from .runs import RunSettings

Wrap = Callable[..., nn.Module]
_RESIDUAL = "commhooks/residual_norm_over_gradient_norm"


@dataclass(frozen=True)
class Counted:
    """Bytes of this rank since the run began."""

    gradient_bytes: int
    payload_bytes: int
    moved_bytes: int
    interface_bytes: int | None = None


class Registered(Protocol):
    """A model in its DDP, with a hook."""

    ddp: nn.Module
    waits: WaitClock

    def counted(self) -> Counted:
        """Return the bytes so far."""

    def payload_by_parameter(self) -> dict[str, float]:
        """Return each parameter's bytes in messages, mean over the steps so far; empty if they are not counted."""

    def residual_ratios(self) -> dict[str, float]:
        """Return the norm of this rank's residuals over its gradients', for each parameter, and under "" for all."""

    def detach(self) -> None:
        """Remove the hook."""


class AttachedHook:
    """One of our compressors, attached."""

    def __init__(self, settings: RunSettings, model: nn.Module, wrap: Wrap, dilation: float) -> None:
        self.waits = WaitClock()
        self.ddp = wrap(model, settings.ddp, settings.bucket_cap_mb)
        around: Callable[[Any], Any] = self.waits.around
        if settings.link.kind == "emulated":
            link = settings.link.slowed(dilation)
            around = lambda inner: self.waits.around(EmulatedLink(inner, link))
        self.attachment = commhooks.attach(
            self.ddp, make_hook(settings.hook, settings.seed), policy=policy_of(settings.hook), wrap_communicator=around
        )

    def counted(self) -> Counted:
        """Return the attachment's counts."""
        counts = self.attachment.statistics()
        return Counted(counts.gradient_bytes, counts.payload_bytes, counts.moved_bytes)

    def payload_by_parameter(self) -> dict[str, float]:
        """Return the attachment's counts by parameter."""
        return {
            name: traffic.payload_bytes / max(traffic.steps, 1)
            for name, traffic in self.attachment.by_parameter().items()
        }

    def residual_ratios(self) -> dict[str, float]:
        """Return the attachment's metrics."""
        found = self.attachment.metrics(by_parameter=True)
        return {tag[len(_RESIDUAL) :].lstrip("/"): value for tag, value in found.items() if tag.startswith(_RESIDUAL)}

    def detach(self) -> None:
        """Detach the compressor."""
        self.attachment.detach()
        del self.ddp


def register(settings: RunSettings, model: nn.Module, wrap: Wrap, dilation: float) -> Registered:
    """Wrap the model in its DDP, and put the run's hook on it."""
    return AttachedHook(settings, model, wrap, dilation)
