"""Training with FSDP2 in place of a DistributedDataParallel: each rank keeps a shard of every parameter."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import commhooks
from commhooks import SettingsError
from commhooks.compressors import COMPRESSORS
from commhooks.experiments.devices import Stopwatch
from commhooks.experiments.hooks import gather_of, make_hook
from commhooks.experiments.links.gloo import course_of, moved_bytes
from commhooks.experiments.links.link import Wire
from commhooks.experiments.links.waits import WaitClock
from commhooks.experiments.runs import RunSettings
from commhooks.experiments.specs import Spec, is_diloco
from commhooks.experiments.timing.link import NoLink
from commhooks.experiments.timing.sharded import blocks_of, modules_of, sharded_step
from commhooks.experiments.timing.step_time import step_time
from commhooks.experiments.training.measure import ExchangeClock, Held
from commhooks.experiments.training.registration import Counted, Registered
from commhooks.experiments.training.stock import NO_HOOK, is_stock
from commhooks.tensors import tensor_bytes


class ShardedHook(Registered):
    """A model that FSDP2 shards: plain, or with one of our compressors in place of its reduce-scatters."""

    can_be_probed = False  # no rank has a whole mean

    def _make_group(self, settings: RunSettings) -> None:
        """Return None: there is no DDP."""

    def _wrapped(self, settings: RunSettings) -> nn.Module:
        self._whole = copy.deepcopy(self._model)
        self._units = shard(self._model)
        return self._model

    def _register(self, settings: RunSettings) -> None:
        self._own = _OwnExchanges(self.wire, self.waits)
        self._sharded: commhooks.Handle[Any] | None = None
        gather = gather_of(settings.hook)
        for unit in self._units:
            if gather is None:
                unit.set_custom_all_gather(_AllGather(self._own))  # type: ignore[arg-type]  # it has the methods of FSDP2's class
            if is_stock(settings.hook):
                unit.set_custom_reduce_scatter(_ReduceScatter(self._own))  # type: ignore[arg-type]  # so has this
        if not is_stock(settings.hook):
            made = make_hook(settings.hook, settings.seed)
            self._sharded = commhooks.attach_sharded(self._model, made, gather=gather, wrap_communicator=self._linked)
        self._steps = 0
        trained = [parameter for parameter in self._whole.parameters() if parameter.requires_grad]
        self._gradient_bytes = sum(map(tensor_bytes, trained))
        self._dense_bytes = step_bytes(self._whole, Spec(NO_HOOK), dist.get_world_size())

    def clock(self) -> ExchangeClock:
        """Return the clock of the steps."""
        return ExchangeClock(Stopwatch(self._device, self.waits.clock), self._held)

    def _held(self) -> Held:
        counts = self._statistics()
        return Held(counts.seconds_exposed + self._own.seconds, counts.seconds_waiting + self._own.seconds)

    def _statistics(self) -> commhooks.Statistics:
        return commhooks.Statistics() if self._sharded is None else self._sharded.statistics()

    def after_step(self) -> None:
        """Count the step."""
        self._steps += 1

    @contextlib.contextmanager
    def shared_model(self) -> Iterator[nn.Module]:
        """Return a context with a whole copy of the model, whose parameters are gathered as for a step."""
        for unit in self._units:
            unit.unshard()
        found = dict(itertools.chain(self._model.named_parameters(), self._model.named_buffers()))
        with torch.no_grad():
            for name, tensor in itertools.chain(self._whole.named_parameters(), self._whole.named_buffers()):
                tensor.copy_(found[name])
        for unit in self._units:
            unit.reshard()
        yield self._whole

    def counted(self) -> Counted:
        """Return the bytes so far, including gathers."""
        counts = self._statistics()
        return Counted(
            self._steps * self._gradient_bytes,
            counts.payload_bytes + self._own.payload_bytes,
            counts.moved_bytes + self._own.moved_bytes,
        )

    def memory(self) -> tuple[int, int]:
        """Return the bytes that the hook reports to use, including rows of reduce-scatters, and those of residuals."""
        if self._sharded is None:
            return 0, 0
        report = self._sharded.memory()
        return report.total + report.gradients, report.residuals

    def dense_bytes(self, gradient_bytes: int, ranks: int) -> int:
        """Return the bytes that a rank sends in a step of plain FSDP2."""
        return self._dense_bytes

    def close(self) -> None:
        """Detach the compressor from the modules."""
        if self._sharded is not None:
            self._sharded.close()
        self._close()


class _OwnExchanges:
    """FSDP2's own collectives on the run's link, counted."""

    def __init__(self, wire: Wire, waits: WaitClock) -> None:
        self._wire, self._waits = wire, waits
        self.payload_bytes = self.moved_bytes = 0
        self.seconds = 0.0  # for which they held up the training thread

    def run(self, kind: str, payload: Tensor, start: Callable[[], dist.Work]) -> None:
        """Run a collective with this rank's payload, and wait until it is done and the link has carried it."""
        began, ranks, size = self._waits.clock(), dist.get_world_size(), tensor_bytes(payload)
        arrival = self._wire.carry(course_of(kind, size, ranks, is_private=False))
        start().wait()
        self._wire.sleep_until(arrival)
        self.payload_bytes += size
        self.moved_bytes += moved_bytes(kind, size, ranks)
        self.seconds += self._waits.clock() - began


class _Exchange:
    """The object that FSDP2 calls for a collective: it allocates memory, and runs and counts FSDP2's own exchange."""

    def __init__(self, own: _OwnExchanges) -> None:
        self._own = own

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Exchange):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self._own.run("all-gather", input_tensor, lambda: group._allgather_base(output_tensor, input_tensor))


class _ReduceScatter(_Exchange):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        self._own.run(
            "reduce-scatter", input_tensor, lambda: group._reduce_scatter_base(output_tensor, input_tensor, options)
        )


def shard(model: nn.Module) -> list[FSDPModule]:
    """Shard each of the model's blocks and the rest of the model over all ranks, and return these modules."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    modules = [*blocks_of(model), model]
    return [fully_shard(module, mesh=mesh) for module in modules]


def step_bytes(model: nn.Module, hook: Spec, ranks: int) -> int:
    """Return the bytes that a rank sends in a step, as a ring moves them, if `shard` shards the model."""
    compressor = None if is_stock(hook) else make_hook(hook)
    step = sharded_step(modules_of(model), compressor, ranks, compute=0.0, gather=gather_of(hook))
    return step_time(step, NoLink(), ranks).bytes_sent


def check_sharded(hook: Spec) -> None:
    """Raise ValueError if FSDP2 cannot train with this hook."""
    if hook.has("policy"):
        raise ValueError(
            f"hook {hook.label!r}: FSDP2 reduces one module at a time, so policy has no effect; leave it out"
        )
    if hook.label != NO_HOOK and (is_stock(hook) or is_diloco(hook) or not make_hook(hook).scatters):
        raise ValueError(
            f"hook {hook.label!r} cannot average shards of gradients, which sharded models need; {NO_HOOK} (plain "
            f"FSDP2) and {', '.join(_that_scatter())} can"
        )
    gather_of(hook)  # raises if weights cannot travel so


def _that_scatter() -> list[str]:
    """Return the names of compressors that can return a rank's shard of the mean."""
    found = []
    for name in sorted(COMPRESSORS):
        with contextlib.suppress(SettingsError):  # one that needs settings
            if commhooks.make_compressor(name).scatters:
                found.append(name)
    return found
