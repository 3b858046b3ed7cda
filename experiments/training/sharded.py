"""Training with FSDP2 in place of a DistributedDataParallel: each rank keeps a shard of every parameter."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import commhooks
from commhooks import SettingsError
from commhooks.communicators.collective import ring_bytes
from commhooks.communicators.gloo import course_of, moved_bytes
from commhooks.compressors import COMPRESSORS
from commhooks.planning.payloads import rounds_of_shards, rows_of
from commhooks.scheduling.lanes import HEADER_BYTES
from commhooks.tensors import tensor_bytes

from ..hooks import make_hook
from ..links.link import Wire
from ..links.waits import WaitClock
from ..runs import RunSettings
from ..specs import Spec, is_seldom
from .measure import ExchangeClock, Held
from .registration import Counted, Registered
from .stock import NO_HOOK, is_stock


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
        self._sharded: commhooks.ShardedAttachment | None = None
        for unit in self._units:
            unit.set_custom_all_gather(_AllGather(self._own))  # type: ignore[arg-type]  # it has the methods of FSDP2's class
            if is_stock(settings.hook):
                unit.set_custom_reduce_scatter(_ReduceScatter(self._own))  # type: ignore[arg-type]  # so has this
        if not is_stock(settings.hook):
            made = make_hook(settings.hook, settings.seed)
            self._sharded = commhooks.attach_sharded(self._model, made, wrap_communicator=self._linked)
        self._steps = 0
        trained = [parameter for parameter in self._whole.parameters() if parameter.requires_grad]
        self._gradient_bytes = sum(map(tensor_bytes, trained))
        self._dense_bytes = step_bytes(self._whole, Spec(NO_HOOK), dist.get_world_size())

    def clock(self) -> ExchangeClock:
        """Return what times the steps."""
        return ExchangeClock(self.waits.clock, self._held)

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
        """Return the bytes so far, those of gathers too."""
        counts = self._statistics()
        return Counted(
            self._steps * self._gradient_bytes,
            counts.payload_bytes + self._own.payload_bytes,
            counts.moved_bytes + self._own.moved_bytes,
        )

    def dense_bytes(self, gradient_bytes: int, ranks: int) -> int:
        """Return what a rank sends in a step of plain FSDP2."""
        return self._dense_bytes

    def detach(self) -> None:
        """Give the modules FSDP2's own reduce-scatter back."""
        if self._sharded is not None:
            self._sharded.detach()
        self._close()


class _OwnExchanges:
    """FSDP2's own collectives on the run's link, counted."""

    def __init__(self, wire: Wire, waits: WaitClock) -> None:
        self._wire, self._waits = wire, waits
        self.payload_bytes = self.moved_bytes = 0
        self.seconds = 0.0  # for which they held up the training thread

    def run(self, kind: str, payload: Tensor, start: Callable[[], dist.Work]) -> None:
        """Return when a collective with this rank's payload is done, and the link has carried it."""
        began, ranks, size = self._waits.clock(), dist.get_world_size(), tensor_bytes(payload)
        arrival = self._wire.carry(course_of(kind, size, ranks, is_private=False))
        start().wait()
        self._wire.sleep_until(arrival)
        self.payload_bytes += size
        self.moved_bytes += moved_bytes(kind, size, ranks)
        self.seconds += self._waits.clock() - began


class _Exchange:
    """What FSDP2 calls for a collective: the memory for it, and its own exchanges."""

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
    """Shard each of the model's blocks, and what is left of the model, over all ranks, and return these modules."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    modules = [*blocks_of(model), model]
    return [fully_shard(module, mesh=mesh) for module in modules]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return what is sharded by itself: the modules in the model's outermost `ModuleList`s and `Sequential`s.

    Those without a matrix are not, as one exchange costs more than their bytes, nor those that share a parameter with
    another module.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found = []
    for block in _listed(model):
        named = [*block.named_parameters(remove_duplicate=False)]
        own = Counter(id(parameter) for _, parameter in named)
        if any(p.dim() > 1 for _, p in named) and all(uses[one] == times for one, times in own.items()):
            found.append(block)
    return found


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if is_list:
            yield child
        else:
            yield from _listed(child)


def parameters_by_module(model: nn.Module) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of each module that `shard` shards, by name: of the blocks, and at last of no block."""
    blocks = blocks_of(model)
    place = {id(parameter): number for number, block in enumerate(blocks) for parameter in block.parameters()}
    found: list[dict[str, nn.Parameter]] = [{} for _ in range(len(blocks) + 1)]
    for name, parameter in model.named_parameters():
        found[place.get(id(parameter), len(blocks))][name] = parameter
    return found


def step_bytes(model: nn.Module, hook: Spec, ranks: int) -> int:
    """Return what a rank sends in a step, as a ring moves it, if the model is sharded as `shard` does.

    The parameters of blocks are gathered twice, those of no block once, as they stay in memory between the passes;
    and the gradients are reduced and scattered. What a rank keeps of a parameter has the same size on every rank.
    """
    *blocks, others = parameters_by_module(model)
    payloads = [sum(map(tensor_bytes, shards_of(own.values(), ranks))) for own in (*blocks, *blocks, others)]
    sends = [("all-gather", payload) for payload in payloads]
    trained = [{name: p for name, p in own.items() if p.requires_grad} for own in (*blocks, others)]
    trained = [own for own in trained if own]
    for own in trained:
        if is_stock(hook):
            sends.append(("reduce-scatter", ranks * sum(map(tensor_bytes, shards_of(own.values(), ranks)))))
        else:
            gradients = {name: torch.zeros_like(parameter) for name, parameter in own.items()}
            sends += itertools.chain.from_iterable(rounds_of_shards(make_hook(hook), gradients, ranks))
            sends += [("all-gather", HEADER_BYTES)] * (len(trained) > 1)  # ranks agree on whose turn it is
    return sum(ring_bytes(kind, payload, ranks) for kind, payload in sends)


def shards_of(tensors: Iterable[Tensor], ranks: int) -> list[Tensor]:
    """Return what the first rank keeps of each tensor, which is as much as any rank sends of it."""
    return [rows_of(tensor.detach(), ranks)[0] for tensor in tensors]


def check_sharded(hook: Spec) -> None:
    """Raise ValueError if FSDP2 cannot train with a hook that can work otherwise."""
    if hook.has("policy"):
        raise ValueError(
            f"hook {hook.label!r}: FSDP2 reduces one module at a time, so policy has no effect; leave it out"
        )
    if hook.label != NO_HOOK and (is_stock(hook) or is_seldom(hook) or not make_hook(hook).scatters):
        raise ValueError(
            f"hook {hook.label!r} cannot average shards of gradients, which sharded models need; {NO_HOOK} (plain "
            f"FSDP2) and {', '.join(_that_scatter())} can"
        )


def _that_scatter() -> list[str]:
    """Return the names of compressors that can return a rank's shard of the mean."""
    found = []
    for name in sorted(COMPRESSORS):
        with contextlib.suppress(SettingsError):  # one that needs settings
            if commhooks.make_compressor(name).scatters:
                found.append(name)
    return found
