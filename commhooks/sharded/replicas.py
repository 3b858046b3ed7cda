"""Averaging over replicas of a model that FSDP2 shards: `attach_replicas`, and its hooks on FSDP modules."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn import Module
from torch.utils import _pytree as pytree  # with which FSDP2 finds the tensors of an output
from torch.utils.hooks import RemovableHandle

from commhooks.communicators.beginning import agree, share_from_rank_0
from commhooks.communicators.parent_group import group_or_default
from commhooks.devices import keep_until_read
from commhooks.errors import AttachError, SettingsError
from commhooks.exchange.checks import checked_compressor, read_text
from commhooks.exchange.exchanger import TensorChannel, TensorFeed
from commhooks.exchange.feed import Channel, Feed
from commhooks.exchange.handle import Handle, open_exchange
from commhooks.exchange.options import Options, settings_of
from commhooks.language.compressor import Compressor
from commhooks.saving.saved import titled
from commhooks.scheduling.policy import PolicyName
from commhooks.sharded.attach import guard_of_reductions
from commhooks.sharded.choosing import refusal_of
from commhooks.sharded.fsdp import (
    ShardedParameter,
    TrainedParameters,
    Unit,
    changed_since,
    check_nothing_is_left,
    has_hooks,
    units_of,
    without_memory,
)
from commhooks.state.memory import MemoryReport
from commhooks.tensors import local
from commhooks.units import counted
from commhooks.unwrapping import everything_kept, kept_buffers, unwrapped
from ddp_core.guard import Guard

Hook = Callable[[Tensor], None]
"""A hook that FSDP2 calls with a module's reduced gradients: 1-D, each parameter's shard padded to the largest
rank's."""
_CHANGED = changed_since("attach_replicas")
_ACTS_EARLY = (
    "has a hook that runs as soon as its gradient is there (register_post_accumulate_grad_hook), which is before the "
    "replicas have averaged it; pass policy='fifo'."
)


class Kept:
    """The gradients that a module keeps aside, with each one's place in them: (shape, padded elements, dtype)."""

    def __init__(self, unit: Unit, reduced: Tensor) -> None:
        self.reduced: Tensor = reduced.clone()
        self._unit = unit
        self._numbers = unit.trained()
        self._places = [(one.own_shape, one.chunk, one.grad_dtype) for one in unit.parameters()]

    @torch.no_grad()
    def give_back(self) -> None:
        """Add the gradients to `.grad`."""
        parts = self.reduced.split([chunk for _, chunk, _ in self._places])
        for shard, part, (shape, _, dtype) in zip(self._unit.shards(self._numbers), parts, self._places, strict=True):
            if shard.grad is None:
                shard.grad = torch.zeros_like(shard, dtype=dtype)
            grad = local(shard.grad)
            grad.add_(part[: shape.numel()].view(shape).to(grad.device))
        keep_until_read([self.reduced])  # it was allocated on a stream of FSDP2's


class Passes:
    """The backward passes of a model, and the gradients that its modules keep from one to a later one.

    A module wants no average over replicas after `set_requires_all_reduce(False)`: what FSDP2 reduced is then kept
    aside, as in native HSDP, and added to the first gradients that the module wants averaged. What a backward pass that
    failed had kept is dropped with all that was kept before, and so it is by `reset_iter_state`, as HSDP's.

    Reentrant checkpointing runs backward passes inside the backward pass. The outermost one is that in which the
    gradient of an output arrives, before any other's.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self.at_end: Callable[[], None] = _do_nothing
        """What to do at the end of each pass, after FSDP2 and after gradients that are kept have left `.grad`."""
        self.may_send_less: Sequence[Unit] = ()
        """The modules of which FSDP2 reduces no parameter that a pass does not use, unless gradients are kept."""
        self._kept: dict[Unit, Kept] = {}
        self._noted: set[Unit] = set()
        """The modules whose kept gradients FSDP2 would drop in `reset_iter_state`, since it has been told of them."""
        self._whole: set[Unit] = set()
        """Those of these modules that send zeros for unused parameters: what is added up must have the same places."""
        self._to_empty: list[Tensor] = []
        """The shards without a gradient before this pass, of modules whose gradients it kept: FSDP2 adds zeros."""
        self._outermost = -1
        """The backward pass under way through the model's output; -1: none is known."""
        self._queued_in = -1
        """The last backward pass at whose end `_end` was queued because of a module."""

    def follow(self, modules: Collection[Module]) -> list[RemovableHandle]:
        """Register hooks that find the outermost backward pass, on the model and what may be called in its place."""
        before = [module.register_forward_pre_hook(self._before_forward) for module in modules]
        return before + [module.register_forward_hook(self._after_forward) for module in modules]

    def keeps(self, unit: Unit, reduced: Tensor) -> bool:
        """Keep a module's gradients if it wants no average, and leave zeros; else add to them what was kept before."""
        # FSDP2 adds them to `.grad` on this stream, and frees them for the next module's reduce-scatter, which is on
        # another one; only for its own all-reduce it keeps them. Without this, replicas_apart in tests/virtual_device
        # is a race.
        keep_until_read([reduced])
        if unit.divide_factor is not None:  # of a sum over all ranks, as in HSDP: the mean over replicas must be a sum
            reduced.mul_(self._replicas)
        if unit in self._noted and unit.was_reset:
            self._kept.pop(unit, None)
        self._noted.discard(unit)
        if unit.wants_replicas:
            if (kept := self._kept.pop(unit, None)) is not None:
                reduced.add_(kept.reduced)
            return False
        if unit in self._kept:
            self._kept[unit].reduced.add_(reduced)
        else:
            self._kept[unit] = Kept(unit, reduced)
        reduced.zero_()
        self._to_empty += [shard for shard in unit.shards() if shard.grad is None]
        self.await_end()
        return True

    def kept_bytes(self) -> int:
        """Return the number of bytes of the gradients that are kept."""
        return sum(kept.reduced.nbytes for kept in self._kept.values())

    def await_end(self) -> None:
        """Have the end of this backward pass noticed, unless it is that of the outermost one."""
        task = torch._C._current_graph_task_id()
        if self._outermost == -1 and task != self._queued_in:
            self._queued_in = task  # unlike a flag, right after a pass that failed, too
            _queue(self._come_last)

    @_disable_dynamo  # a compiled training step would trace the engine
    def _before_forward(self, *_: object) -> None:
        if torch._C._current_graph_task_id() != -1:  # computed again
            return
        self._drop_what_failed()

    def _drop_what_failed(self) -> None:
        if self._outermost != -1 or self._to_empty:  # the last pass failed, and never came to its end
            self._kept.clear()
            self._to_empty.clear()
        self._outermost = -1

    @_disable_dynamo
    def _after_forward(self, _module: Module, _inputs: object, outputs: object) -> None:
        for tensor in pytree.tree_leaves(outputs):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin)

    def _begin(self, _gradient: Tensor) -> None:
        if self._outermost == -1:
            self._outermost = torch._C._current_graph_task_id()
            _queue(self._come_last)
            for unit in self.may_send_less:
                self._send(unit, is_whole=not unit.wants_replicas or unit in self._kept)

    def _send(self, unit: Unit, *, is_whole: bool) -> None:
        if is_whole and unit not in self._whole:
            self._whole.add(unit)
            unit.send_unused()
        elif unit in self._whole and not is_whole:
            self._whole.remove(unit)
            if unit.is_there:
                unit.end_sending_unused()

    def close(self) -> list[str]:
        """Give back what is kept, and let FSDP2 send what it would send; return the names of the modules that kept."""
        self._drop_what_failed()
        while self._noted:
            unit = self._noted.pop()
            if not unit.is_there or unit.was_reset:
                self._kept.pop(unit, None)
            else:
                unit.note_kept(None)
        names = [unit.name for unit in self._kept]
        while self._kept:
            self._kept.popitem()[1].give_back()
        for unit in self.may_send_less:
            self._send(unit, is_whole=False)
        self.at_end = _do_nothing  # it belongs to what holds this: residuals would stay until cycles are collected
        return names

    def _come_last(self) -> None:
        """Queue the end behind FSDP2's own callbacks for the end of the pass, one for each root."""
        _queue(self._end)

    @_disable_dynamo
    def _end(self) -> None:
        if torch._C._current_graph_task_id() == self._outermost:
            self._outermost = -1
        while self._to_empty:
            self._to_empty.pop().grad = None
        for unit, kept in self._kept.items():
            if unit.is_there:
                unit.note_kept(kept.reduced)
                self._noted.add(unit)
        self.at_end()


class PerModule:
    """The exchange of one module's shards, as soon as FSDP2 has reduced them."""

    def __init__(self, unit: Unit, exchanger: TensorChannel, passes: Passes) -> None:
        self._unit, self._exchanger, self._passes = unit, exchanger, passes
        self._parts = [(one.name, one.own_shape, one.chunk) for one in unit.parameters()]
        self._trained = unit.trained()

    @_disable_dynamo  # as in Passes
    @torch.no_grad()
    def __call__(self, reduced: Tensor) -> None:
        """Overwrite the gradients with their mean over the replicas, or keep them if the module wants none yet."""
        if reduced.numel() != sum(chunk for *_, chunk in self._parts) or self._unit.trained() != self._trained:
            self._exchanger.fail(f"{self._unit.name}: {_CHANGED}.")
        if not self._unit.wants_replicas:
            self._check_can_keep()
        if self._passes.keeps(self._unit, reduced):
            return
        places = zip(self._parts, reduced.split([chunk for *_, chunk in self._parts]), strict=True)
        self._exchanger.average({name: place[: shape.numel()].view(shape) for (name, shape, _), place in places})

    def _check_can_keep(self) -> None:
        why = "set_manual_backward_finalization" if torch._C._current_graph_task_id() == -1 else ""
        for (name, *_), shard in zip(self._parts, self._unit.shards(), strict=True):
            if has_hooks(shard):
                why = f"register_post_accumulate_grad_hook: FSDP2 would call the hook of {name!r} with zeros"
        if why:
            self._exchanger.fail(
                f"{self._unit.name}: set_requires_all_reduce(False) cannot be combined with {why}; accumulate "
                "gradients with set_requires_gradient_sync(False)."
            )


class AtTheEnd:
    """An exchange of all shards' gradients, after FSDP2 has finished a backward pass in which it reduced any."""

    def __init__(self, units: Sequence[Unit], exchanger: TensorChannel, passes: Passes) -> None:
        self._units, self._exchanger, self._passes = units, exchanger, passes
        self._names = {unit: [one.name for one in unit.parameters()] for unit in units}
        self._dtypes = {one.name: one.grad_dtype for unit in units for one in unit.parameters()}
        self._trained = [unit.trained() for unit in units]
        self._reduced: set[Unit] = set()
        """The modules reduced since the last exchange that want an average."""
        self._is_due = False
        """True if any was reduced since then: replicas that use different ones must not decide by `_reduced`."""
        self._means: dict[str, Tensor] = {}
        """The gradients that earlier passes averaged, out of `.grad` until the next means are added to them."""
        self._averaged: dict[str, weakref.ref[Tensor]] = {}
        """The gradients that the last exchange left in `.grad`."""
        self._was_early = False
        """True if the exchange of these would have come before FSDP2's work was done, and was left out."""
        passes.at_end = self._exchange

    def follow(self, modules: Mapping[Any, Unit | None]) -> list[RemovableHandle]:
        """Register hooks that raise if the last backward pass cannot have been averaged."""
        return [
            module.register_forward_pre_hook(functools.partial(self._before_forward, unit))
            for module, unit in modules.items()
        ]

    @_disable_dynamo  # as in Passes
    def _before_forward(self, unit: Unit | None, *_: object) -> None:
        if torch._C._current_graph_task_id() != -1:  # computed again
            return
        if unit is not None and unit.is_in_backward_pass:
            self._exchanger.fail(
                "the last backward pass never came to its end, so FSDP2 would not end the next one either: after an "
                "exception in it, resume from a checkpoint. (reset_iter_state() on the root FSDP module lets training "
                "continue, but FSDP2 then adds the root's gradients of the failed pass to the next ones.)"
            )
        if self._was_early:
            self._exchanger.fail(
                "the last backward pass ended without an average over the replicas, since the whole model is computed "
                "again within it: call attach_replicas with the module around it that fully_shard was called with, or "
                "use checkpoint(..., use_reentrant=False)."
            )
        self._is_due = False  # of a pass that failed
        self._reduced.clear()
        self._means.clear()

    def hook_of(self, unit: Unit) -> Hook:
        """Return the hook for a module."""
        return functools.partial(self._note, unit)

    @_disable_dynamo  # as in Passes
    @torch.no_grad()
    def _note(self, unit: Unit, reduced: Tensor) -> None:
        """Record that a module's gradients were reduced, or keep them; FSDP2 adds them to `.grad` next."""
        if acting := next((name for name, shard in self._named(unit) if has_hooks(shard)), None):
            self._exchanger.fail(f"{acting!r} {_ACTS_EARLY}")
        if torch._C._current_graph_task_id() == -1:
            self._exchanger.fail(
                f"{unit.name}: FSDP2 reduced its gradients outside a backward pass (set_manual_backward_finalization), "
                "where nothing says which module is the last; pass policy='fifo', or set it to False."
            )
        self._is_due = True
        if self._passes.keeps(unit, reduced):
            return
        if unit not in self._reduced:  # a module that runs twice may be reduced twice in a pass
            self._put_aside(unit)
        self._reduced.add(unit)
        self._passes.await_end()

    def _put_aside(self, unit: Unit) -> None:
        """Empty `.grad` of what earlier passes averaged; fail if something else is in it."""
        for name, shard in self._named(unit):
            if (grad := shard.grad) is None:
                continue
            averaged = self._averaged.get(name)
            if (averaged is None or averaged() is not grad) and local(grad).any():
                self._exchanger.fail(
                    f"{name} had a gradient before this backward pass that this attachment has not averaged over the "
                    "replicas: clear gradients with optimizer.zero_grad() after attaching, and after an exception in a "
                    "backward pass."
                )
            self._means[name], shard.grad = grad, None

    @_disable_dynamo
    @torch.no_grad()
    def _exchange(self) -> None:
        self._is_due &= any(unit.wants_replicas for unit in self._units)
        if not self._is_due:
            return
        self._was_early = any(unit.is_in_backward_pass for unit in self._units)
        if self._was_early:
            return
        if [unit.trained() for unit in self._units] != self._trained:
            self._exchanger.fail(f"{_CHANGED}.")
        for unit in self._units:
            if unit not in self._reduced:
                self._put_aside(unit)
        self._is_due = False
        self._reduced.clear()
        gradients = dict[str, Tensor]()
        for name, shard in itertools.chain.from_iterable(map(self._named, self._units)):
            if shard.grad is None:  # other replicas may have used it
                shard.grad = torch.zeros_like(shard, dtype=self._dtypes[name])
            gradients[name] = local(shard.grad)
        self._exchanger.average(gradients)
        empty = self._empty_again(gradients)
        for unit in self._units:
            self._add_up(unit, gradients, empty)

    def _empty_again(self, gradients: Mapping[str, Tensor]) -> set[str]:
        """Return the parameters that had no gradient before, want no average, and are not owed a residual's mean.

        The ranks of a site decide together: gradients are clipped by collectives of those that have one.
        """
        left_out = [unit for unit in self._units if not unit.wants_replicas]
        names = [name for unit in left_out for name in self._names[unit] if name not in self._means]
        if not names:
            return set()
        site, device = left_out[0].process_group, left_out[0].parameters()[0].device
        is_owed = torch.stack([gradients[name].any().to(device, torch.int32) for name in names])
        if site.size() > 1:
            dist.all_reduce(is_owed, dist.ReduceOp.MAX, group=site)
        return {name for name, owed in zip(names, is_owed.tolist(), strict=True) if not owed}

    def _add_up(self, unit: Unit, gradients: Mapping[str, Tensor], empty: Collection[str]) -> None:
        """Add the means in `.grad` to those of earlier passes."""
        for name, shard in self._named(unit):
            if name in self._means:
                shard.grad = self._means.pop(name)
                local(shard.grad).add_(gradients[name])
            elif name in empty:
                shard.grad = None
            if shard.grad is not None:
                self._averaged[name] = weakref.ref(shard.grad)

    def _named(self, unit: Unit) -> Iterable[tuple[str, Tensor]]:
        # If others are trained by now, the names are wrong; then the end of the pass fails.
        return zip(self._names[unit], unit.shards(), strict=False)


class ReplicasFeed(TensorFeed):
    """Shards of the gradients, after FSDP2 has reduced them.

    Its channels are FSDP modules under "fifo", and "all modules" under "fused". If there are several shards, each
    channel's name has this rank's, so that a checkpoint of all ranks holds the state of every shard.
    """

    caller = way = "attach_replicas"
    ended: ClassVar[str] = Feed.ended
    label = "replicas"

    def __init__(self, model: Module, units: Sequence[Unit], group: dist.ProcessGroup, policy: PolicyName) -> None:
        self._model = weakref.ref(unwrapped(model))
        self._is_fused = policy == "fused"
        self._shard = units[0].shard
        groups = {"all modules": units} if self._is_fused else {unit.name: [unit] for unit in units}
        self._units = {titled(name, "shard", *self._shard): of_group for name, of_group in groups.items()}
        like = {
            name: {one.name: _like(one, policy) for unit in of_group for one in unit.parameters()}
            for name, of_group in self._units.items()
        }
        super().__init__(like, in_turns=True, group=group)
        self._hooks: dict[Unit, Hook] = {}
        self._on_model: list[RemovableHandle] = []
        self._passes = Passes(group.size())
        self._is_first = False

    def plug(self, channels: Mapping[str, Any]) -> None:
        """Copy rank 0's parameters and buffers to all replicas, and hook into the modules' reduce-scatters."""
        model = self._model()
        assert model is not None, "attach_replicas holds it"
        caches = kept_buffers(model, saved=False)
        share_from_rank_0(self.caller, everything_kept(model), caches, self.process_group, AttachError)
        self._is_first = next(iter(channels.values())).engine.connection.rank == 0
        every = [unit for units in self._units.values() for unit in units]
        trained = TrainedParameters(self.caller, model, every, next(iter(channels.values())).engine.fail)
        self._on_model = [trained.follow(model)]
        # as Any: for mypy, FSDPModule is no Module
        modules: dict[Any, Unit | None] = {model: None} | {unit.module: unit for unit in every}
        self._on_model += self._passes.follow(modules)
        for name, units in self._units.items():
            at_the_end = AtTheEnd(units, channels[name], self._passes) if self._is_fused else None
            if at_the_end is not None:
                self._passes.may_send_less = units
                self._on_model += at_the_end.follow(modules)
            for unit in units:
                self._hooks[unit] = hook = (
                    PerModule(unit, channels[name], self._passes) if at_the_end is None else at_the_end.hook_of(unit)
                )
                unit.set_all_reduce_hook(hook)
                if not self._is_fused:
                    unit.send_unused()  # a step's size must not differ

    def unplug(self) -> None:
        """Remove the hooks from the modules.

        Gradients that modules keep aside, after `set_requires_all_reduce(False)`, are added to `.grad`, of this replica
        alone, and rank 0 warns of them.
        """
        super().unplug()
        while self._on_model:
            self._on_model.pop().remove()
        while self._hooks:
            unit, hook = self._hooks.popitem()
            if unit.is_there and unit.all_reduce_hook() is hook:
                unit.set_all_reduce_hook(None)
            if unit.is_there and not self._is_fused:
                unit.end_sending_unused()
        kept = self._passes.close()
        if kept and self._is_first:
            more = f" and {counted(len(kept) - 1, 'other module')}" if len(kept) > 1 else ""
            warnings.warn(
                f"commhooks, attach_replicas: {kept[0]}{more} kept gradients aside (set_requires_all_reduce(False)); "
                "close has added them to .grad, where each replica has its own: average them, or call "
                "optimizer.zero_grad(), before the optimizer steps.",
                stacklevel=3,
            )

    @property
    def is_plugged(self) -> bool:
        """True while the model's gradients go through the channels: until `unplug`, or until the model is gone."""
        return bool(self._hooks) and all(
            unit.is_there and unit.all_reduce_hook() is hook for unit, hook in self._hooks.items()
        )

    def is_own(self, saved: str) -> bool:
        """Return whether this rank loads a channel of a checkpoint; it skips other shards' channels."""
        number, ranks = self._shard
        return not any(saved.endswith(titled("", "shard", other, ranks)) for other in range(ranks) if other != number)

    def memory(self, channels: Iterable[Channel]) -> MemoryReport:
        """Return the bytes in use, by purpose; `gradients` are copies that are sent and received, or kept aside."""
        report = super().memory(channels)
        return dataclasses.replace(report, gradients=report.gradients + self._passes.kept_bytes())

    def averaged_by(self, channel: Channel) -> Mapping[Tensor, str]:
        """Return this rank's shards of a channel's parameters."""
        units = self._units[channel.label]
        return {parameter.shard: parameter.name for unit in units for parameter in unit.parameters()}

    def guard_of(self, channel: Channel) -> Guard | None:
        """Return a guard that counts a channel's averages."""
        return guard_of_reductions(channel, self.averaged_by(channel), "all-reduce hook")


def attach_replicas(model: Module, compressor: Compressor | str, **options: Unpack[Options]) -> Handle[TensorChannel]:
    """Average the gradients of a model that FSDP2 shards over its replicas, with `compressor`.

    `model` is a module to which, or to modules in which, `torch.distributed.fsdp.fully_shard` was applied, over a mesh
    of one dimension, such as the ranks of one site. FSDP2 reduces gradients within a site, and the compressor averages
    the shards between sites. Call it on every rank, between the same two backward passes, and before or after the first
    forward pass, once the parameters have memory. A string is passed to `make_compressor`; every compressor is
    possible. It can be combined with `attach_sharded`, which compresses the reduction within a site.

    All parameters and buffers are overwritten with those of the group's rank 0, as in a DistributedDataParallel. Left
    as each rank has them are `fully_shard`'s `ignored_params`, the model's `_ddp_params_and_buffers_to_ignore`, buffers
    that are not saved and whose shapes differ between ranks, and frozen tensors without bytes of their own: weights
    quantised to codes (a subclass with a `__torch_dispatch__`), sparse and expanded ones.

    `Options` describes the options, of which all but `guard` apply, and `atomic` under "fused".

    - `process_group` connects the ranks that keep the same shard, one in each site; None: the default group, for meshes
      of one rank, with which this is plain replication.
    - `policy`: "fused" averages all gradients at once, at the end of each backward pass that synchronises: few
      collectives, whatever the number of modules. Parameters that a pass does not use get a gradient, of zeros unless
      another replica used them. "fifo" averages each module's gradients as soon as they are reduced, in
      `MixedPrecisionPolicy`'s `reduce_dtype`, during the rest of the backward pass. All replicas must then use the same
      modules. With either, means add up in `.grad`, and gradients of a module after `set_requires_all_reduce(False)`
      are kept aside until the module wants an average again, as with HSDP.
    - `residuals`: a residual has the size of this rank's shard.

    `set_gradient_divide_factor` divides the sum over all ranks, those of other replicas included, as with HSDP.

    Raises `AttachError` if nothing in the model is sharded, if a trained parameter is outside what is, if an all-reduce
    hook is set already, or if ranks disagree, for example about the shard that they keep; `SettingsError` for FSDP2's
    own replication (HSDP), for a process group with ranks that keep other shards, and for settings that cannot work.
    """
    group = group_or_default(options.get("process_group"))
    try:
        compressor, options = read_text("attach_replicas", compressor, options)
        settings = settings_of("attach_replicas", options)
        if settings.atomic and settings.policy == "fifo":
            raise SettingsError(
                "attach_replicas(atomic=True): under 'fifo', modules are exchanged one by one, and one that is done "
                "cannot be undone; use policy='fused'."
            )
        compressor = checked_compressor("attach_replicas", compressor)
        units = [unit for unit in units_of("attach_replicas", model) if unit.trained()]
        _check(model, units, group, settings.policy)
        check_nothing_is_left("attach_replicas", model, units, group)
        feed = ReplicasFeed(model, units, group, settings.policy)
    except Exception as error:  # whatever it is, the other ranks are waiting for an answer
        agree("attach_replicas", group, error)
        raise
    number, ranks = units[0].shard
    facts = [f"shard: {number} of {ranks}", f"modules: {', '.join(unit.name for unit in units)}"]
    agree("attach_replicas", group, "\n".join(facts + [unit.fingerprint() for unit in units]), AttachError)
    return open_exchange(feed, compressor, **options)


def _check(model: Module, units: Sequence[Unit], group: dist.ProcessGroup, policy: PolicyName) -> None:
    """Raise `AttachError` or `SettingsError` if the model cannot be averaged over this group's ranks."""
    for unit in units:
        if why := refusal_of(unit):
            raise SettingsError(f"attach_replicas: {unit.name}: {why}.")
        if unit.process_group is not units[0].process_group:
            raise SettingsError(
                f"attach_replicas: {unit.name} and {units[0].name} are sharded over different ranks, so no process "
                "group connects the ranks that keep the same shards of both; shard the model over one mesh."
            )
    both = {*dist.get_process_group_ranks(units[0].process_group)} & {*dist.get_process_group_ranks(group)}
    if len(both) > 1:
        raise SettingsError(
            f"attach_replicas: ranks {sorted(both)} of the process group keep different shards of {units[0].name}; "
            'pass the group of the ranks that keep the same one, such as mesh["replicas"].get_group() of a mesh of two '
            'dimensions, and shard over mesh["shards"].'
        )
    if any(kept.is_meta for kept in everything_kept(unwrapped(model)).values()):
        raise AttachError(
            "attach_replicas: parameters or buffers have no memory yet (meta), so those of rank 0 cannot be copied; "
            "call model.to_empty first, and fill them."
        )
    for unit in units:
        if unit.all_reduce_hook() is not None:
            raise AttachError(f"attach_replicas: {unit.name} has an all-reduce hook already; close that first.")
        for one in unit.parameters():
            if policy == "fused" and has_hooks(one.shard):
                raise SettingsError(f"attach_replicas: {one.name!r} {_ACTS_EARLY}")


def _like(parameter: ShardedParameter, policy: PolicyName) -> Tensor:
    """Return a tensor like a parameter's averaged gradient: like its `.grad` ("fused"), or as FSDP2 reduces it."""
    kept = local(parameter.shard)
    if policy == "fused":
        return without_memory(kept.shape, parameter.grad_dtype, kept.device)
    return without_memory(kept.shape, parameter.reduced_in, parameter.device)


def _queue(callback: Callable[[], None]) -> None:
    """Run a callback at the end of the current backward pass, after those queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _do_nothing() -> None: ...
