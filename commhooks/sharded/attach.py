"""Attach a compressor to a model that FSDP2 shards: `attach_sharded`, and the `ShardedAttachment` that it returns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from commhooks.communicators.connection import WrapCommunicator
from commhooks.engine.engine import Engine
from commhooks.errors import AttachError, SettingsError
from commhooks.hooks.grouped import Grouped
from commhooks.hooks.handle import Handle, check_run_settings, checked_compressor, refusal_of
from commhooks.hooks.watching import Watch, optimizer_of
from commhooks.language.compressor import Compressor
from commhooks.scheduling.line import ProcessGroupLine
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
        self._before = unit.reduce_scatter(), unit.sends_unused()
        self._runs = ReduceScatter(unit, engine, memory)
        self._watches: list[Watch] = []

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
        self._unit.module.set_reduce_scatter_unused_params(True, recurse=False)  # a step's size must not differ

    def _shards(self) -> set[Tensor]:
        return {parameter.shard for parameter in self._unit.parameters()}

    def _watch(self, optimizer: Optimizer) -> None:
        shards, trained = self._shards(), {p for group in optimizer.param_groups for p in group["params"]}
        if not shards.isdisjoint(trained):
            advice = (
                f"It trains parameters of {self._unit.name}: run the last backward pass before each step with "
                "set_requires_gradient_sync(True), and set no other custom reduce-scatter."
            )
            self._watches.append(Watch(optimizer, shards, {}, lambda: self.steps, self._engine, advice))

    def _detach(self) -> None:
        while self._watches:  # they hold parameters
            self._watches.pop().remove()
        if self.is_attached:
            runs, sends_unused = self._before
            self._unit.module.set_custom_reduce_scatter(runs)
            self._unit.module.set_reduce_scatter_unused_params(sends_unused, recurse=False)
        self._engine.stop()


class ShardedAttachment(Grouped[ShardedUnit]):
    """A compressor attached to the FSDP modules of a model, by their names, as returned by `attach_sharded`."""

    def __init__(
        self, units: Sequence[ShardedUnit], names: Sequence[str], line: ProcessGroupLine, memory: Memory
    ) -> None:
        self._handles = dict(zip(names, units, strict=True))
        self._line = line
        self._memory = memory

    @property
    def is_attached(self) -> bool:
        """Whether the model's gradients go through this compressor: until `detach`, or until the model is gone."""
        return all(unit.is_attached for unit in self.values())

    @property
    def steps(self) -> int:
        """The number of backward passes synchronised since attaching, by the module with the most."""
        return max(unit.steps for unit in self.values())

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """The rank of this process and the number of ranks, among those that have the shards."""
        return self._line.rank, self._line.world_size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group whose ranks have the shards; None once it has been destroyed."""
        return self._line.process_group

    def memory_report(self) -> MemoryReport:
        """Return how many bytes are used, and for what; `gradients` are the largest module's input and output."""
        return added((unit.memory_report() for unit in self.values()), self._memory.bytes())

    def watch(self, *optimizers: object) -> None:
        """Raise `HookDidNotRunError` whenever one of these takes a step on gradients that bypassed the compressor.

        Pass the optimizers of the model, or what a framework wraps around them. See `Attachment.watch`. With one rank
        FSDP2 exchanges nothing, and nothing is watched.
        """
        if self._line.world_size == 1:
            return
        shards = set[Tensor]().union(*(unit._shards() for unit in self.values()))
        found = [optimizer_of("watch", shards, optimizer) for optimizer in optimizers]
        for optimizer, unit in itertools.product(found, self.values()):
            unit._watch(optimizer)

    def detach(self) -> None:
        """Give the modules FSDP2's own reduce-scatter back. A second call does nothing.

        Every rank must detach between the same two steps.
        """
        for unit in self.values():
            unit._detach()

    def close(self) -> None:
        """Detach."""
        self.detach()


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
    if torch._C._current_graph_task_id() != -1:
        raise AttachError("attach_sharded: a backward pass is under way; call it between two passes.")
    units = [unit for unit in units_of(model) if unit.parameters()]
    _check(units)
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


def _check(units: Sequence[Unit]) -> None:
    if not units:
        raise AttachError("attach_sharded: all parameters are frozen.")
    for unit in units:
        if unit.is_replicated:
            raise SettingsError(
                f"attach_sharded: FSDP2 averages the gradients of {unit.name} over replicas itself, uncompressed "
                "(HSDP: a mesh of two dimensions; or replicate); shard over a mesh of one."
            )
        if unit.process_group is not units[0].process_group:
            raise SettingsError(f"attach_sharded: {unit.name} and {units[0].name} are sharded over different ranks.")
        if not unit.has_default_reduce_scatter():
            raise AttachError(
                f"attach_sharded: {unit.name} has another custom reduce-scatter already; detach that first."
            )


def _cannot_scatter(compressor: Compressor) -> SettingsError | None:
    if compressor.scatters:
        return None
    return SettingsError(
        f"attach_sharded: {compressor!r} averages whole gradients, of which no rank can return its shard alone; "
        "all-reduce, fp16, bf16 and codes of blocks such as int8 can."
    )
