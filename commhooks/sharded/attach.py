"""Attach a compressor to a model that FSDP2 shards: `attach_sharded`, and the `ShardedAttachment` that it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Module

from commhooks.communicators.beginning import agree
from commhooks.communicators.connection import WrapCommunicator
from commhooks.compressors.codecs.codec import Codec
from commhooks.engine.engine import Engine
from commhooks.errors import AttachError, SettingsError
from commhooks.hooks.handle import Handle, check_run_settings, checked_compressor, refusal_of
from commhooks.language.compressor import Compressor
from commhooks.language.lending import Pool
from commhooks.scheduling.ledger import Statistics, total
from commhooks.scheduling.line import ProcessGroupLine
from commhooks.sharded.attachment import ModulesAttachment
from commhooks.sharded.fsdp import Unit, check_nothing_is_left, group_of, is_default, units_of
from commhooks.sharded.gathering import Gather, Gathers, code_of
from commhooks.sharded.reducing import Memory, ReduceScatter
from commhooks.state.loss_scale import Scaler
from commhooks.state.memory import MemoryReport, added
from commhooks.state.table import ResidualStorage


class ShardedUnit(Handle):
    """The compressor of one FSDP module, as a `ShardedAttachment` holds it: counts, state, and `replace`."""

    def __init__(self, unit: Unit, engine: Engine, memory: Memory) -> None:
        self._engine: Engine = engine
        self._unit = unit
        self._before = unit.reduce_scatter()
        self._runs = ReduceScatter(unit, engine, memory)
        self._is_plugged_in = False

    @property
    def steps(self) -> int:
        """The number of reduce-scatters begun."""
        return self._engine.step

    @property
    def is_attached(self) -> bool:
        """True while the module's gradients go through this compressor."""
        return self._unit.is_there and self._unit.reduce_scatter() is self._runs

    def _made_engine(self) -> Engine:
        return self._engine

    def _candidate(self, compressor: Compressor | str) -> tuple[Compressor, SettingsError | None]:
        candidate, refusal = super()._candidate(compressor)
        return candidate, refusal or _cannot_scatter(candidate)

    def plug_in(self) -> None:
        """Register the compressor as the module's reduce-scatter."""
        self._unit.module.set_custom_reduce_scatter(self._runs)  # type: ignore[arg-type]  # it has the methods of FSDP2's class
        self._is_plugged_in = True
        self._unit.send_unused()  # a step's size must not differ

    def _detach(self) -> None:
        if self.is_attached:
            self._unit.module.set_custom_reduce_scatter(self._before)
        if self._is_plugged_in and self._unit.is_there:
            self._unit.end_sending_unused()
        self._is_plugged_in = False
        self._engine.stop()


class ShardedAttachment(ModulesAttachment[ShardedUnit]):
    """A compressor attached to the FSDP modules of a model, by their names, as returned by `attach_sharded`."""

    _seam = "custom reduce-scatter"

    def __init__(
        self, units: Mapping[str, ShardedUnit], gathers: Mapping[str, Gather], line: ProcessGroupLine, memory: Memory
    ) -> None:
        self._handles = units
        self.gathers = Gathers(gathers)
        """The gathers of weights, with `gather=`, by module name; frozen modules have one too."""
        self._line = line
        self._memory = memory
        self._watches = []

    def __str__(self) -> str:
        """Return a summary of each module, and of the gathers."""
        return super().__str__() + (f"\n{self.gathers}" if self.gathers else "")

    @property
    def is_attached(self) -> bool:
        """True while the model's gradients go through this compressor: until `detach`, or until the model is gone."""
        return all(unit.is_attached for unit in self.values()) and all(g.is_attached for g in self.gathers.values())

    def statistics(self) -> Statistics:
        """Return this rank's totals over all modules and `gathers`; its steps are the most of any module."""
        reduced = super().statistics()
        return dataclasses.replace(total([reduced, self.gathers.statistics()]), steps=reduced.steps)

    def memory_report(self) -> MemoryReport:
        """Return the bytes in use, by purpose; `gradients` are the largest module's input and output."""
        report = added((unit.memory_report() for unit in self.values()), self._memory.bytes())
        return dataclasses.replace(report, working=report.working + self.gathers.working_bytes())

    def detach(self) -> None:
        """Restore FSDP2's own reduce-scatter and all-gather in the modules. A second call does nothing.

        Every rank must detach between the same two steps.
        """
        self._end_watching()
        for unit in self.values():
            unit._detach()
        for gather in self.gathers.values():
            gather.detach()

    def _shards(self, label: str) -> dict[Tensor, str]:
        return {parameter.shard: parameter.name for parameter in self[label]._unit.parameters()}


def attach_sharded(
    model: Module,
    compressor: Compressor | str,
    *,
    gather: Codec | torch.dtype | str | None = None,
    hook_timeout: float | None = None,
    scaler: Scaler | None = None,
    residuals: ResidualStorage = "fp32",
    wrap_communicator: WrapCommunicator | None = None,
) -> ShardedAttachment:
    """Average the gradients of a model that FSDP2 shards, with `compressor`; each rank gets its shard of the mean.

    `model` is a module to which, or to modules in which, `torch.distributed.fsdp.fully_shard` was applied; each such
    module with parameters of its own gets the compressor. Call it on every rank, between the same two backward passes,
    and before or after the first forward pass. A string is passed to `make_compressor`; all-reduce, casts, top-k,
    random-k and codes of blocks (int8, int4, sign and others) can return a shard of the mean. A cast sends 16 bits and
    adds them up in the gradients' dtype: with `MixedPrecisionPolicy(reduce_dtype=torch.float32)` in fp32.

    - `gather`: the form in which parameters are gathered for forward and backward passes: as codes of blocks, "int8",
      "fp8", "int4:block=64" or a `Codec`; or in a dtype, "bf16" or `torch.float16`. All ranks compute with the values
      that the codes represent, while the optimizer trains the shards at full precision. Elements beyond the last whole
      block of a parameter's shard are sent uncoded. "fp32" only counts bytes and names a rank that fails. None: FSDP2's
      own all-gather.
    - `hook_timeout`, `scaler`, `residuals` and `wrap_communicator`: see `attach`. Each rank sends its gradient of the
      *whole* parameter, a shard to each rank, so on every rank the residual has the whole parameter's size:
      `residuals="bf16"` halves it, "host" moves it to the host's memory, and `error_feedback=False` in the compressor
      leaves it out.
    - Zeros are sent for parameters without a gradient in a backward pass, as with
      `set_reduce_scatter_unused_params(True)`.

    Raises `AttachError` if nothing in the model is sharded, if a trained parameter is outside what is, if something is
    attached already, or if ranks disagree; `SettingsError` for a compressor that cannot return shards, for FSDP2's own
    replication (HSDP), and for settings that cannot work.
    """
    try:
        compressor = checked_compressor("attach_sharded", compressor)
        check_run_settings("attach_sharded", "fifo", hook_timeout)
        code = None if gather is None else code_of(gather)
        found = units_of("attach_sharded", model, frozen=code is not None)
        units = [unit for unit in found if unit.parameters()]
        gathered = [] if code is None else found
        check_nothing_is_left("attach_sharded", model, found, units[0].process_group)
        _refuse_others("reduce-scatter", {unit: unit.reduce_scatter() for unit in units})
        _refuse_others("all-gather", {unit: unit.all_gather() for unit in gathered})
    except Exception as error:  # whatever it is, the other ranks are waiting for an answer
        agree("attach_sharded", group_of(model), error, AttachError)
        raise
    # A rank with one more would wait for the others.
    names = f"modules: {', '.join(unit.name for unit in units)}\n"
    names += f"gather: {code} of {', '.join(unit.name for unit in gathered)}\n" if code is not None else ""
    agree("attach_sharded", units[0].process_group, names, AttachError)
    line = ProcessGroupLine(
        units[0].process_group,
        label="FSDP",
        wrap_communicator=wrap_communicator,
        hook_timeout=hook_timeout,
        may_bypass=wrap_communicator is not None,
        may_be_alone=units[0].is_inner,
    )
    memory, pool = Memory(), Pool()
    made, gathers = dict[str, ShardedUnit](), dict[str, Gather]()
    try:
        for unit in units:
            engine = Engine(
                compressor,
                line,
                fingerprint=names + unit.fingerprint(),
                residuals=residuals,
                may_join=False,
                name=unit.name,
                is_sharded=True,
            )
            made[unit.name] = ShardedUnit(unit, engine, memory)
            if scaler is not None:
                engine.loss_scale.follow(scaler)
            like = engine.state.named()
            refusal = _cannot_scatter(compressor) or refusal_of(compressor, like, line)
            engine.open(next(iter(like.values())).device, refusal)
        for unit in gathered:
            assert code is not None, "nothing is gathered without"
            gathers[unit.name] = Gather(unit, code, line, pool)
            gathers[unit.name].open(names + unit.fingerprint(frozen=True))
    except Exception:
        for one in made.values():
            one._engine.stop()
        for other in gathers.values():
            other.stop()
        raise
    for one in made.values():
        one.plug_in()
    for other in gathers.values():
        other.plug_in()
    return ShardedAttachment(made, gathers, line, memory)


def _refuse_others(what: str, communications: Mapping[Unit, object]) -> None:
    for unit, communication in communications.items():
        if not is_default(communication):
            raise AttachError(f"attach_sharded: {unit.name} has another custom {what} already; detach that first.")


def _cannot_scatter(compressor: Compressor) -> SettingsError | None:
    if compressor.scatters:
        return None
    return SettingsError(
        f"attach_sharded: {compressor!r} averages whole gradients, of which no rank can return its shard alone; "
        "all-reduce, fp16, bf16, top-k, random-k and codes of blocks such as int8 can."
    )
