"""Attach a compressor to a model that FSDP2 shards: `attach_sharded`, and the feed of its modules' reduce-scatters."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from commhooks.communicators.beginning import agree
from commhooks.compressors.codecs.codec import Codec
from commhooks.errors import AttachError, SettingsError
from commhooks.exchange.checks import checked_compressor
from commhooks.exchange.feed import Channel, Feed
from commhooks.exchange.handle import Handle, open_exchange
from commhooks.exchange.options import Options, check_flags, settings_of
from commhooks.exchange.watching import ReductionsGuard
from commhooks.language.compressor import Compressor
from commhooks.language.lending import Pool
from commhooks.making import read_hook
from commhooks.saving.saved import titled
from commhooks.sharded.choosing import Choice, NotCompressed, Part, Patterns
from commhooks.sharded.fsdp import TrainedParameters, Unit, check_nothing_is_left, group_of, is_default, units_of
from commhooks.sharded.gathering import Code, Gather, Gathers, check_can_be_gathered, code_of
from commhooks.sharded.reducing import CompressedReduceScatter, Memory
from commhooks.state.memory import MemoryReport, added
from commhooks.unwrapping import unwrapped
from ddp_core.guard import Guard


def attach_sharded(
    model: Module,
    compressor: Compressor | str,
    *,
    gather: Codec | torch.dtype | str | None = None,
    modules: Patterns | None = None,
    except_modules: Patterns = (),
    strict: bool = False,
    **options: Unpack[Options],
) -> Handle[Channel]:
    """Average the gradients of a model that FSDP2 shards, with `compressor`; each rank gets its shard of the mean.

    `model` is a module to which, or to modules in which, `torch.distributed.fsdp.fully_shard` was applied; each such
    module with parameters of its own gets the compressor, and is a channel of the handle, by its name. Call it on every
    rank, between the same two backward passes, and before or after the first forward pass. A string is read as by
    `make_compressor`, and may say `gather` too: "int8:gather=int8". All-reduce, casts, top-k, random-k and codes of
    blocks (int8, int4, sign and others) can return a shard of the mean. A cast sends 16 bits and adds them up in the
    gradients' dtype: with `MixedPrecisionPolicy(reduce_dtype=torch.float32)` in fp32.

    - `gather`: the form in which parameters are gathered for forward and backward passes: as codes of blocks, "int8",
      "fp8", "int4:block=64" or a `Codec`; or in a dtype, "bf16" or `torch.float16`. All ranks compute with the values
      that the codes represent, while the optimizer trains the shards at full precision. Elements beyond the last whole
      block of a parameter's shard are sent uncoded. "fp32" only counts bytes and names a rank that fails. None: FSDP2's
      own all-gather. The handle's `gathers` count them.
    - `modules` and `except_modules`: shell patterns for names of modules that `fully_shard` was called with, such as
      "layers.*.experts"; "the model" is the root. The first limits the compressor to those modules, the second leaves
      some out. FSDP2 reduces and gathers the rest itself; the handle's `not_compressed` lists it.
    - `strict`: by default everything that can be attached is, and rank 0 warns of the rest. True: that is an error.
    - `Options` describes the options, of which `hook_timeout`, `scaler`, `residuals` and `wrap_communicator` apply.
      Each rank sends its gradient of the *whole* parameter, a shard to each rank, so on every rank the residual has the
      whole parameter's size: `residuals="bf16"` halves it, "host" moves it to the host's memory, and
      `error_feedback=False` in the compressor leaves it out.
    - Zeros are sent for parameters without a gradient in a backward pass, as with
      `set_reduce_scatter_unused_params(True)`.

    Raises `AttachError` if nothing in the model is sharded, if a trained parameter is outside what is, if something is
    attached already, or if ranks disagree; `SettingsError` for a compressor that cannot return shards, if no module can
    be attached to, for a pattern that matches no module, and for settings that cannot work.
    """
    whole = group_of(model)
    try:
        if isinstance(compressor, str):
            hook = read_hook(compressor)
            if hook.gather is not None and gather not in (None, hook.gather):
                raise SettingsError(
                    f"attach_sharded({compressor!r}): gather is given twice, in the text and beside it."
                )
            compressor, gather = hook.compressor, hook.gather or gather
            if hook.policy is not None:
                options["policy"] = hook.policy
        settings_of("attach_sharded", options)
        check_flags("attach_sharded", strict=strict)
        compressor = checked_compressor("attach_sharded", compressor)
        code = None if gather is None else code_of(gather)
        choice = _choice(model, whole, modules, except_modules, code, strict=strict)
        facts = choice.facts() + (f"gather: {code}\n" if code is not None else "")
    except Exception as error:  # whatever it is, the other ranks are waiting for an answer
        agree("attach_sharded", whole, error, AttachError)
        raise
    assert whole is not None, "the units have one"
    agree("attach_sharded", whole, facts, AttachError)  # a rank with one more would wait for others
    parts = choice.parts(whole)
    if whole.rank() == 0:
        choice.warn()
    return open_exchange(ModulesFeed(model, choice, facts, whole, parts, code), compressor, **options)


def _choice(
    model: Module,
    whole: dist.ProcessGroup | None,
    modules: Patterns | None,
    except_modules: Patterns,
    code: Code | None,
    *,
    strict: bool,
) -> Choice:
    """Return what to attach to; raise if something is attached already, or a trained parameter is left out."""
    found = units_of("attach_sharded", model)
    choice = Choice("attach_sharded", found, modules, except_modules, strict=strict, frozen=code is not None)
    assert whole is not None, "the units have one"
    check_nothing_is_left("attach_sharded", model, found, whole)
    for unit in choice.trained:
        _refuse_another("reduce-scatter", unit, unit.reduce_scatter())
    if code is not None:
        for unit in choice.units:
            _refuse_another("all-gather", unit, unit.all_gather())
            check_can_be_gathered(unit, code)
    return choice


class ModulesFeed(Feed):
    """The reduce-scatters of FSDP2's modules, and their all-gathers if these are coded too.

    State is kept for whole parameters, of which each rank sends a shard to every rank.
    """

    caller = way = "attach_sharded"
    label = "FSDP"
    is_sharded = True

    def __init__(
        self,
        model: Module,
        choice: Choice,
        names: str,
        whole: dist.ProcessGroup,
        parts: Mapping[str, Part],
        code: Code | None,
    ) -> None:
        self._found, self._left = choice.found, choice.left
        # Those of the largest group first: its ranks agree over the first channel's connection.
        units = sorted(choice.trained, key=lambda unit: parts[unit.name].group is not whole)
        self._units = {unit.name: unit for unit in units}
        self._whole, self._parts = whole, parts
        groups = {parts[unit.name].group for unit in units}
        self._gathered = choice.units if code is not None else []  # frozen ones over a connection that others have
        self._code = code
        self.names = names
        """What ranks compare before any of their modules."""
        self.not_compressed: Mapping[str, NotCompressed] = choice.not_compressed
        """The modules whose gradients FSDP2 reduces itself, by name."""
        self.may_be_alone: bool | None = units[0].is_inner or len(groups) > 1
        self._before = {name: unit.reduce_scatter() for name, unit in self._units.items()}
        self._like = {
            name: {parameter.name: parameter.like() for parameter in unit.parameters()}
            for name, unit in self._units.items()
        }
        self._memory = Memory()
        self._model = weakref.ref(unwrapped(model))
        self._check: RemovableHandle | None = None
        self._runs: dict[str, CompressedReduceScatter] = {}
        self.gathers: Gathers = Gathers()

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The largest group of ranks that have shards."""
        return self._whole

    def group_of(self, channel: str) -> dist.ProcessGroup:
        """Return the group of the ranks that have a module's shards."""
        return self._parts[channel].group

    def title(self, channel: str) -> str:
        """Return a module's name, with the ranks that have its shards if these are not all: errors number them anew."""
        group = self.group_of(channel)
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        return channel if group is self._whole else f"{channel} (of ranks {ranks})"

    def saved_as(self, channel: str) -> str:
        """Return a module's name, with the number of the ranks that have its experts if others have other ones."""
        return titled(channel, "part", *self._parts[channel][1:])

    def is_own(self, saved: str) -> bool:
        """Return whether this rank has the experts whose state this is."""
        others = (
            titled(name, "part", number, part.groups)
            for name, part in self._parts.items()
            for number in range(part.groups)
            if number != part.number
        )
        return saved not in others

    def like(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return each module's trained parameters, whole, by name."""
        return self._like

    def facts(self, channel: str) -> str:
        """Return a module's parameters, and the names of all modules."""
        return self.names + self._units[channel].fingerprint()

    def refusal_of(self, compressor: Compressor) -> SettingsError | None:
        """Return why a compressor cannot return a shard of the mean, if it cannot."""
        if compressor.scatters:
            return None
        return SettingsError(
            f"attach_sharded: {compressor!r} averages whole gradients, of which no rank can return its shard alone; "
            "all-reduce, fp16, bf16, top-k, random-k and codes of blocks such as int8 can."
        )

    def plug(self, channels: Mapping[str, Any]) -> None:
        """Register the modules' reduce-scatters and all-gathers."""
        pool = Pool()
        lines = {self.group_of(name): channels[name] for name in reversed(self._units)}
        for unit in self._gathered:
            assert self._code is not None, "nothing is gathered without"
            facts = self.names + unit.fingerprint(frozen=True)
            first = lines[self.group_of(unit.name)]
            self.gathers[unit.name] = gather = Gather(unit, self._code, first.engine.connection, facts, pool)
            for engine in gather.engines:
                engine.open(first.device)
        # From here on nothing waits for other ranks.
        model = self._model()
        assert model is not None, "attach_sharded holds it"
        (of_all, *_) = channels.values()
        self._check = TrainedParameters(self.caller, model, self._found, of_all.engine.fail, self._left).follow(model)
        for name, unit in self._units.items():
            engine, own = channels[name].engine, self.group_of(name)
            others = [first.engine for group, first in lines.items() if group is not own]
            engine.state.cut_along(
                {self._like[name][one.name]: one.dimension for one in unit.parameters() if one.dimension}
            )
            self._runs[name] = runs = CompressedReduceScatter(unit, engine, self._memory, others)
            unit.set_reduce_scatter(runs)
            unit.send_unused()  # a step's size must not differ
        for unit in self._gathered:
            unit.set_all_gather(self.gathers[unit.name])

    def unplug(self) -> None:
        """Restore FSDP2's own reduce-scatters and all-gathers."""
        if self._check is not None:
            self._check.remove()
        while self._runs:
            name, runs = self._runs.popitem()
            unit = self._units[name]
            if unit.is_there and unit.reduce_scatter() is runs:
                unit.set_reduce_scatter(self._before[name])
            if unit.is_there:
                unit.end_sending_unused()
        for gather in self.gathers.values():
            gather.detach()

    @property
    def is_plugged(self) -> bool:
        """True while the model's gradients go through the channels: until `unplug`, or until the model is gone."""
        units = self._units
        runs = [units[name].is_there and units[name].reduce_scatter() is one for name, one in self._runs.items()]
        return bool(runs) and all(runs) and all(gather.is_attached for gather in self.gathers.values())

    def averaged_by(self, channel: Channel) -> Mapping[Tensor, str]:
        """Return a module's shards of parameters."""
        return {parameter.shard: parameter.name for parameter in self._units[channel.label].parameters()}

    def guard_of(self, channel: Channel) -> Guard | None:
        """Return a guard that counts a module's reduce-scatters."""
        return guard_of_reductions(channel, self.averaged_by(channel), "custom reduce-scatter")

    def memory(self, channels: Iterable[Channel]) -> MemoryReport:
        """Return the bytes in use, by purpose; `gradients` are the largest module's input and output."""
        report = added((one.memory() for one in channels), self._memory.bytes())
        return dataclasses.replace(
            report,
            working=report.working + self.gathers.working_bytes(),
            not_compressed=sum(one.gradient_bytes for one in self.not_compressed.values()),
        )


def guard_of_reductions(channel: Channel, averaged: Mapping[Tensor, str], seam: str) -> Guard | None:
    """Return a guard that counts the rounds of a channel; None if one rank averages with nobody."""
    if channel.engine.connection.world_size == 1:
        return None
    advice = (
        "the last backward pass before the step did not synchronise; run it with set_requires_gradient_sync(True), and "
        f"set no other {seam}"
    )
    named = [(name, shard) for shard, name in averaged.items()]
    return ReductionsGuard(named, channel.label, channel.engine, advice, lambda: channel.engine.step)


def _refuse_another(what: str, unit: Unit, communication: object) -> None:
    if not is_default(communication):
        raise AttachError(f"attach_sharded: {unit.name} has another custom {what} already; close that first.")
