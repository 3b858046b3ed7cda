"""A model with a run's hook, over the run's link: its clock, its counts and its checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commhooks
import ddp_core
from commhooks.communicators import Communicator
from commhooks.experiments.cluster import gloo_interface, interface_bytes
from commhooks.experiments.devices import Stopwatch, uses_streams
from commhooks.experiments.hooks import make_hook, policy_of
from commhooks.experiments.links.link import EmulatedLink, Wire
from commhooks.experiments.links.linked_group import LinkedGroup
from commhooks.experiments.links.waits import WaitClock
from commhooks.experiments.runs import RunSettings
from commhooks.experiments.tasks import LoadedTask
from commhooks.experiments.training.diloco import settings_of
from commhooks.experiments.training.measure import Clock, StepClock
from commhooks.experiments.training.stock import register_stock
from commhooks.experiments.versions import numbers_of
from commhooks.tensors import tensor_bytes

_LOOPBACKS = {"lo", "lo0"}
_RESIDUAL = "commhooks/residual_norm_over_gradient_norm"


@dataclass(frozen=True)
class Counted:
    """Bytes of this rank since the run began."""

    gradient_bytes: int
    payload_bytes: int
    moved_bytes: int


class Registered:
    """A model in its DDP, with one of our hooks. Everything that the DDP sends passes the run's link, buffers too."""

    can_be_probed = True
    """True if it averages whole gradients of the step, which a `Probe` compares with their true mean."""

    def __init__(self, settings: RunSettings, task: LoadedTask, time_scale: float) -> None:
        self._model, self._device = task.model, task.device
        self.is_queued: bool = uses_streams(self._device)
        self.waits: WaitClock = WaitClock()
        self.wire: Wire = Wire(settings.link.slowed(time_scale), clock=self.waits.clock)
        self._group = self._make_group(settings)
        self.ddp: nn.Module = self._wrapped(settings)
        self.optimizer: torch.optim.Optimizer = task.optimizer(
            settings.optimizer
        )  # of the parameters that the wrapped model has
        self._register(settings)

    def _make_group(self, settings: RunSettings) -> LinkedGroup | None:
        """Return the group of the DDP; None: the default group, whose link needs no emulation."""
        return LinkedGroup(_world(), self.wire) if settings.link.kind == "emulated" and not self.is_queued else None

    def _wrapped(self, settings: RunSettings) -> nn.Module:
        """Return the module that the loss calls."""
        return wrap_in_ddp(self._model, settings.ddp, settings.bucket_cap_mb, self._group)

    def _register(self, settings: RunSettings) -> None:
        self._attachment = commhooks.attach(
            self.ddp,
            make_hook(settings.hook, settings.seed),
            policy=policy_of(settings.hook),
            process_group=_world(),
            wrap_communicator=self._linked,
        )

    def _linked(self, inner: Communicator) -> Communicator:
        return self.waits.around(EmulatedLink(inner, self.wire))

    @property
    def _hooks(self) -> commhooks.Handle[Any] | commhooks.DiLoCo:
        """The object whose state a checkpoint saves as the hook's."""
        return self._attachment

    def after_step(self) -> None:
        """Do the work that follows the optimizer's step; its time counts as the step's."""

    def clock(self) -> Clock:
        """Return the clock of the steps."""
        return StepClock(self.ddp, self._model, self.waits, Stopwatch(self._device, self.waits.clock))

    def shared_model(self) -> contextlib.AbstractContextManager[nn.Module]:
        """Return a context with the model that all ranks share; every rank enters it."""
        return contextlib.nullcontext(self._model)

    def dense_bytes(self, gradient_bytes: int, ranks: int) -> int:
        """Return the bytes that a rank would have sent for these gradients without compression."""
        return 2 * (ranks - 1) * gradient_bytes // ranks

    def save(self, folder: Path, step: int, extra: Mapping[str, Any]) -> None:
        """Save model, optimizer and the hook's state after a step, replacing the checkpoint before."""
        commhooks.save_checkpoint(
            folder,
            step=step,
            model=self._model,  # its ranks are those of the default group; the DDP's own is the link
            optimizer=self.optimizer,
            hooks=self._hooks,
            extra=extra,
            keep=1,
            flush=False,  # it must survive the end of the ranks, and rarely that of the machine
        )

    def load(self, folder: Path) -> Mapping[str, Any] | None:
        """Load the last checkpoint of `save`, and return its `extra`; None: there is no checkpoint."""
        found = commhooks.load_checkpoint(folder, model=self._model, optimizer=self.optimizer, hooks=self._hooks)
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

    def close(self) -> None:
        """Remove the hook, and close the DDP and its group."""
        self._attachment.close()
        self._close()

    def _close(self) -> None:
        del self.ddp  # a DDP must go before its process group does
        if self._group is not None:
            self._group.close()


class StockHook(Registered):
    """One of PyTorch's hooks. Its process group counts its bytes, but not by parameter; its residuals are unknown."""

    def _make_group(self, settings: RunSettings) -> LinkedGroup:
        # Its threads do not show when they wait: while a transfer is in progress counts as waiting.
        return LinkedGroup(_world(), self.wire, self.waits, is_queued=self.is_queued)

    def _register(self, settings: RunSettings) -> None:
        assert self._group is not None, "a stock hook always has one"
        register_stock(self.ddp, settings.hook, self._group, is_ordered=self.is_queued)
        self._gradient_bytes = 0
        for parameter in self.ddp.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._count_gradient)

    def _count_gradient(self, parameter: Tensor) -> None:
        self._gradient_bytes += tensor_bytes(parameter)

    def counted(self) -> Counted:
        """Return the bytes so far, without broadcasts."""
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

    def close(self) -> None:
        """Close the DDP and its group; PyTorch has no way to remove a hook."""
        self._close()


class DiLoCoHook(Registered):
    """DiLoCo, which trains the plain module: it averages changes of parameters, not gradients."""

    can_be_probed = False

    def _make_group(self, settings: RunSettings) -> None:
        """Return None: there is no DDP."""

    def _wrapped(self, settings: RunSettings) -> nn.Module:
        return self._model

    def _register(self, settings: RunSettings) -> None:
        self._diloco = commhooks.DiLoCo(
            self._model,
            self.optimizer,
            process_group=_world(),
            wrap_communicator=self._linked,
            **settings_of(settings.hook, settings.seed),
        )
        self._bytes = sum(tensor_bytes(parameter) for parameter in self._diloco.trained_parameters)
        self._rounds = 0
        self._payload = self._moved = 0  # bytes of exchanges whose means have been used
        self._earlier = (0, 0)  # what to add to the bytes that this process counts

    @property
    def _hooks(self) -> commhooks.DiLoCo:
        return self._diloco

    def after_step(self) -> None:
        """Count the step, and exchange what is due; an exchange's bytes count in the step that uses its mean."""
        self._diloco.step()
        if (rounds := self._diloco.statistics().rounds) != self._rounds:
            self._rounds = rounds
            self._payload, self._moved = self._sent()

    def _sent(self) -> tuple[int, int]:
        """Return payload bytes and moved bytes, including exchanges whose means are yet to be used."""
        counts = self._diloco.statistics().traffic
        return self._earlier[0] + counts.payload_bytes, self._earlier[1] + counts.moved_bytes

    def save(self, folder: Path, step: int, extra: Mapping[str, Any]) -> None:
        """Save as for a hook, with the bytes of exchanges whose means are yet to be used."""
        self._diloco.snapshot()  # waits for what is under way
        payload, moved = self._sent()
        super().save(folder, step, {**extra, "to_be_used": [payload - self._payload, moved - self._moved]})

    def load(self, folder: Path) -> Mapping[str, Any] | None:
        """Load the last checkpoint of `save`, and return its `extra`; None: there is no checkpoint."""
        found = super().load(folder)
        if found is not None:
            self._rounds = self._diloco.statistics().rounds
            (payload, moved), (old_payload, old_moved) = found["to_be_used"], self._sent()
            self._earlier = payload - old_payload, moved - old_moved
        return found

    @contextlib.contextmanager
    def shared_model(self) -> Iterator[nn.Module]:
        """Return a context in which the model has the outer copies, with exchanges under way taken into account."""
        with self._diloco.outer_parameters():
            yield self._model

    def counted(self) -> Counted:
        """Return the bytes so far, without buffers; gradient bytes are the ones that a DDP would have averaged."""
        return Counted(self._bytes * self._diloco.steps, self._payload, self._moved)

    def payload_by_parameter(self) -> dict[str, float]:
        """Return each parameter's bytes in messages, mean over the rounds so far."""
        found = self._diloco.exchange.by_parameter()
        return {name: traffic.payload_bytes / max(traffic.steps, 1) for name, traffic in found.items()}

    def residual_ratios(self) -> dict[str, float]:
        """Return nothing: the residuals belong to the messages of rounds, not to gradients."""
        return {}

    def close(self) -> None:
        """End the exchanges."""
        self._diloco.close()
        self._close()


def wrap_in_ddp(
    model: nn.Module, ddp: str, bucket_cap_mb: float | None, group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Return the model in ddp_core's class ('core') or in PyTorch's ('torch').

    Raises ValueError for PyTorch's over an emulated link with a PyTorch older than 2.8.
    """
    if ddp == "torch" and isinstance(group, LinkedGroup) and numbers_of(torch.__version__) < (2, 8):
        raise ValueError(
            f"PyTorch {torch.__version__}: its DistributedDataParallel hangs over a process group that is written in "
            "Python, as an emulated link is. Use PyTorch 2.8 or newer, ddp_core, or a link that is not emulated."
        )
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
