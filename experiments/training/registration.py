"""Putting a run's hook on its model, over the run's link, and what can be asked of it afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
import ddp_core
from commhooks.hooks.optimizers import unsuited
from commhooks.tensors import tensor_bytes

from ..cluster import gloo_interface, interface_bytes
from ..hooks import make_hook, policy_of
from ..links.link import EmulatedLink, Wire
from ..links.linked_group import LinkedGroup
from ..links.waits import WaitClock
from ..runs import RunSettings
from ..specs import Spec
from .stock import check_stock, is_stock, register_stock

_LOOPBACKS = {"lo", "lo0"}
_RESIDUAL = "commhooks/residual_norm_over_gradient_norm"


@dataclass(frozen=True)
class Counted:
    """Bytes of this rank since the run began."""

    gradient_bytes: int
    payload_bytes: int
    moved_bytes: int


class Registered:
    """A model in its DDP, with one of our hooks. All that the DDP sends passes the run's link, buffers too."""

    def __init__(self, settings: RunSettings, model: nn.Module, dilation: float) -> None:
        self._model = model
        self.waits = WaitClock()
        self.wire = Wire(settings.link.slowed(dilation), clock=self.waits.clock)
        self._group = self._make_group(settings)
        self.ddp = wrap_in_ddp(model, settings.ddp, settings.bucket_cap_mb, self._group)
        self._register(settings)

    def _make_group(self, settings: RunSettings) -> LinkedGroup | None:
        """Return the group of the DDP; None: the default group, on a link that takes its time by itself."""
        return LinkedGroup(_world(), self.wire) if settings.link.kind == "emulated" else None

    def _register(self, settings: RunSettings) -> None:
        self._attachment = commhooks.attach(
            self.ddp,
            make_hook(settings.hook, settings.seed),
            policy=policy_of(settings.hook),
            process_group=_world(),
            wrap_communicator=lambda inner: self.waits.around(EmulatedLink(inner, self.wire)),
        )

    def save(self, folder: Path, step: int, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any]) -> None:
        """Save model, optimizer and the hook's state after a step, in place of what was saved before."""
        commhooks.save_checkpoint(
            folder,
            step=step,
            model=self._model,  # its ranks are those of the default group; the DDP's own is the link
            optimizer=optimizer,
            hooks=self._attachment,
            extra=extra,
            keep=1,
            flush=False,  # it must survive the end of the ranks, and rarely that of the machine
        )

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> Mapping[str, Any] | None:
        """Load what `save` saved last, and return its `extra`; None: nothing was saved."""
        found = commhooks.load_checkpoint(folder, model=self._model, optimizer=optimizer, hooks=self._attachment)
        return None if found is None else found.extra

    def counted(self) -> Counted:
        """Return the bytes so far."""
        counts = self._attachment.statistics()
        return Counted(counts.gradient_bytes, counts.payload_bytes, counts.moved_bytes)

    def payload_by_parameter(self) -> dict[str, float]:
        """Return each parameter's bytes in messages, mean over the steps so far; empty if they are not counted."""
        return {
            name: traffic.payload_bytes / max(traffic.steps, 1)
            for name, traffic in self._attachment.by_parameter().items()
        }

    def residual_ratios(self) -> dict[str, float]:
        """Return the norm of this rank's residuals over its gradients', for each parameter, and under "" for all."""
        found = self._attachment.metrics(by_parameter=True)
        return {tag[len(_RESIDUAL) :].lstrip("/"): value for tag, value in found.items() if tag.startswith(_RESIDUAL)}

    def detach(self) -> None:
        """Remove the hook, and end what belongs to the DDP."""
        self._attachment.detach()
        self._close()

    def _close(self) -> None:
        del self.ddp  # a DDP must go before its process group does
        if self._group is not None:
            self._group.close()


class StockHook(Registered):
    """One of PyTorch's hooks, which is counted by its process group: not by parameter, and without its residuals."""

    def _make_group(self, settings: RunSettings) -> LinkedGroup:
        # Its threads do not show when they wait: while a transfer is in progress counts as waiting.
        return LinkedGroup(_world(), self.wire, self.waits)

    def _register(self, settings: RunSettings) -> None:
        assert self._group is not None, "a stock hook always has one"
        register_stock(self.ddp, settings.hook, self._group)
        self._gradient_bytes = 0
        for parameter in self.ddp.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._count_gradient)

    def _count_gradient(self, parameter: Tensor) -> None:
        self._gradient_bytes += tensor_bytes(parameter)

    def counted(self) -> Counted:
        """Return the bytes so far, without those of broadcasts."""
        assert self._group is not None, "a stock hook always has one"
        traffic = [counts for kind, counts in self._group.traffic.items() if kind != "broadcast"]
        return Counted(
            self._gradient_bytes,
            sum(counts.payload_bytes for counts in traffic),
            sum(counts.moved_bytes for counts in traffic),
        )

    def payload_by_parameter(self) -> dict[str, float]:
        """Return nothing: PyTorch's hooks do not count."""
        return {}

    def residual_ratios(self) -> dict[str, float]:
        """Return nothing: PyTorch's hooks keep their residuals to themselves."""
        return {}

    def detach(self) -> None:
        """End what belongs to the DDP; PyTorch has no way to remove a hook."""
        self._close()


def register(settings: RunSettings, model: nn.Module, dilation: float) -> Registered:
    """Wrap the model in its DDP, and put the run's hook on it."""
    return (StockHook if is_stock(settings.hook) else Registered)(settings, model, dilation)


def check_hook(hook: Spec, parameters: Mapping[str, nn.Parameter] | None = None) -> None:
    """Raise an error if there is no such hook, if a setting cannot work, or if it does not accept the parameters."""
    if is_stock(hook):
        check_stock(hook)
    else:
        make_hook(hook).check(parameters or {}, None)


def unsuited_hook(hook: Spec, optimizer: torch.optim.Optimizer, model: nn.Module) -> str | None:
    """Return why a hook may diverge under an optimizer, and what to set; None if nothing is known."""
    return None if is_stock(hook) else unsuited(make_hook(hook), optimizer, model.parameters())


def wrap_in_ddp(
    model: nn.Module, ddp: str, bucket_cap_mb: float | None, group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Return the model in ddp_core's class ('core') or in PyTorch's ('torch')."""
    kind = ddp_core.DistributedDataParallel if ddp == "core" else nn.parallel.DistributedDataParallel
    wrapped: nn.Module = kind(model, bucket_cap_mb=bucket_cap_mb, process_group=group)
    return wrapped


def sent_by_interface(settings: RunSettings) -> int | None:
    """Return the bytes sent so far by the network interface that Gloo was told to use.

    None if it was told none, or if the interface does not send for this rank alone: the link is emulated, several ranks
    run on this machine (torchrun's LOCAL_WORLD_SIZE), or it is the loopback, which sends for every process.
    """
    name = gloo_interface()
    shared = settings.link.kind == "emulated" or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1
    return None if shared or name is None or name in _LOOPBACKS else interface_bytes(name)[0]


def _world() -> Any:
    return dist.group.WORLD
