"""Attach a compressor to a model that FSDP2 shards: `attach_sharded`, and the `ShardedAttachment` that it returns."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module

from commhooks.communicators.connection import WrapCommunicator
from commhooks.engine.engine import Engine
from commhooks.errors import AttachError, SettingsError
from commhooks.hooks.handle import Handle, check_run_settings, checked_compressor, refusal_of
from commhooks.language.compressor import Compressor
from commhooks.scheduling.line import ProcessGroupLine
from commhooks.sharded.attachment import ModulesAttachment
from commhooks.sharded.fsdp import Unit, units_of
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
        """How many reduce-scatters have begun."""
        return self._engine.step

    @property
    def is_attached(self) -> bool:
        """Whether the module's gradients go through this compressor."""
        return self._unit.is_there and self._unit.reduce_scatter() is self._runs

    def _made_engine(self) -> Engine:
        return self._engine

    def _candidate(self, compressor: Compressor | str) -> tuple[Compressor, SettingsError | None]:
        candidate, refusal = super()._candidate(compressor)
        return candidate, refusal or _cannot_scatter(candidate)

    def _plug_in(self) -> None:
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

    def __init__(
        self, units: Sequence[ShardedUnit], names: Sequence[str], line: ProcessGroupLine, memory: Memory
    ) -> None:
        self._handles = dict(zip(names, units, strict=True))
        self._line = line
        self._memory = memory
        self._watches = []

    @property
    def is_attached(self) -> bool:
        """Whether the model's gradients go through this compressor: until `detach`, or until the model is gone."""
        return all(unit.is_attached for unit in self.values())

    def memory_report(self) -> MemoryReport:
        """Return how many bytes are used, and for what; `gradients` are the largest module's input and output."""
        return added((unit.memory_report() for unit in self.values()), self._memory.bytes())

    def detach(self) -> None:
        """Give the modules FSDP2's own reduce-scatter back. A second call does nothing.

        Every rank must detach between the same two steps.
        """
        self._end_watching()
        for unit in self.values():
            unit._detach()

    def _shards(self, label: str) -> set[Tensor]:
        return {parameter.shard for parameter in self[label]._unit.parameters()}

    def _advice(self, label: str) -> str:
        return (
            f"It trains parameters of {label}: run the last backward pass before each step with "
            "set_requires_gradient_sync(True), and set no other custom reduce-scatter."
        )


def attach_sharded(
    model: Module,
    compressor: Compressor | str,
    *,
    hook_timeout: float | None = None,
    scaler: Scaler | None = None,
    residuals: ResidualStorage = "fp32",
    wrap_communicator: WrapCommunicator | None = None,
) -> ShardedAttachment:
    """Average the gradients of a model that FSDP2 shards with `compressor`, which each rank gets its shard of.

    `model` is what `torch.distributed.fsdp.fully_shard` was called with, on it or on modules in it: each such module
    with parameters of its own is attached. Call it on every rank, between the same two backward passes, and before or
    after the first forward pass. A string is passed to `make_compressor`; all-reduce, casts and codes of blocks (int8,
    int4, sign and others) can return a shard of the mean. A cast sends 16 bits and adds them up in the gradients'
    dtype: with `MixedPrecisionPolicy(reduce_dtype=torch.float32)` in fp32.

    - `hook_timeout`, `scaler`, `residuals` and `wrap_communicator` are those of `attach`. A rank encodes the gradient
      of the *whole* parameter, since it sends to every rank that keeps a part, so a residual has that size on every
      rank, not that of a shard: `residuals="bf16"` or "host" makes it smaller, and `error_feedback=False` in the
      compressor leaves it out.
    - Parameters without a gradient in a backward pass send zeros, as with `set_reduce_scatter_unused_params(True)`.

    Raises `AttachError` if nothing in the model is sharded, if it is attached already, or if ranks disagree;
    `SettingsError` for a compressor that cannot return shards, for FSDP2's own replication (HSDP), and for settings
    that cannot work.
    """
    compressor = checked_compressor("attach_sharded", compressor)
    check_run_settings("attach_sharded", "fifo", hook_timeout)
    units = units_of("attach_sharded", model)
    for unit in units:
        if not unit.has_default_reduce_scatter():
            raise AttachError(
                f"attach_sharded: {unit.name} has another custom reduce-scatter already; detach that first."
            )
    line = ProcessGroupLine(
        units[0].process_group,
        label="FSDP",
        wrap_communicator=wrap_communicator,
        hook_timeout=hook_timeout,
        may_bypass=wrap_communicator is not None,
    )
    memory, made = Memory(), list[ShardedUnit]()
    names = f"modules: {', '.join(unit.name for unit in units)}\n"  # a rank with one more would wait for the others
    try:
        for unit in units:
            engine = Engine(
                compressor,
                line,
                fingerprint=names + unit.fingerprint(),
                residuals=residuals,
                may_join=False,
                name=unit.name,
            )
            made.append(ShardedUnit(unit, engine, memory))
            if scaler is not None:
                engine.loss_scale.follow(scaler)
            like = engine.state.named()
            refusal = _cannot_scatter(compressor) or refusal_of(compressor, like, line)
            engine.open(next(iter(like.values())).device, refusal)
    except Exception:
        for one in made:
            one._engine.stop()
        raise
    for one in made:
        one._plug_in()
    return ShardedAttachment(made, [unit.name for unit in units], line, memory)


def _cannot_scatter(compressor: Compressor) -> SettingsError | None:
    if compressor.scatters:
        return None
    return SettingsError(
        f"attach_sharded: {compressor!r} averages whole gradients, of which no rank can return its shard alone; "
        "all-reduce, fp16, bf16 and codes of blocks such as int8 can."
    )
