"""Feeds, which say what differs between the ways in, and their channels: which tensors, who calls, what to undo."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.engine.engine import Engine
from commhooks.errors import AttachError, SettingsError
from commhooks.exchange.checks import check_compressor_for, checked_compressor
from commhooks.language.compressor import Compressor
from commhooks.saving.resumption import differences, lay_out, restore, snapshot_of
from commhooks.saving.rules import LoadRules
from commhooks.saving.saved import ONLY, SavedChannel
from commhooks.scheduling.ledger import ParameterTraffic, Statistics
from commhooks.state.memory import MemoryReport, added
from commhooks.state.table import StateTable
from ddp_core.guard import Guard


class Channel:
    """One engine of an exchange: its compressor, counts, memory and state."""

    def __init__(self, label: str, engine: Engine, feed: Feed) -> None:
        self.label = label
        """Its name in the handle, and in saved state if there are several."""
        self.engine = engine
        """What averages its buckets."""
        self._feed = feed

    def __str__(self) -> str:
        """Return a summary: the compressor, the ranks, any failure, and the statistics so far."""
        engine = self.engine
        where = f"rank {engine.connection.rank} of {engine.connection.world_size}, policy {engine.policy!r}"
        failure = engine.failure()
        state = f"\nended by: {failure}" if failure is not None else "\nclosed" if engine.channel.is_closed else ""
        return f"{engine.compressor}\n{where}{state}\n{self.statistics()}"

    @property
    def name(self) -> str:
        """Its name in errors."""
        return self.engine.channel.title

    @property
    def compressor(self) -> Compressor:
        """The compressor in use."""
        return self.engine.compressor

    @property
    def state(self) -> StateTable:
        """The compressor's state, by parameter."""
        return self.engine.state

    @property
    def steps(self) -> int:
        """The number of steps, or rounds, begun so far."""
        return self.engine.step

    def statistics(self) -> Statistics:
        """Return this rank's totals so far."""
        return self.engine.statistics()

    def last_step(self) -> Statistics:
        """Return this rank's counts for the last complete step."""
        return self.engine.channel.ledger.last_step()

    def by_parameter(self) -> dict[str, ParameterTraffic]:
        """Return each parameter's share of this rank's totals so far, by name."""
        return self.engine.channel.ledger.by_parameter()

    def memory(self) -> MemoryReport:
        """Return the bytes in use on this rank, by purpose."""
        return self.engine.memory()

    def open(self) -> None:
        """Connect to the other ranks now; raise `AttachError` if they disagree."""
        self.engine.open(self.device, self.refusal_of(self.compressor))

    def check_open(self, caller: str) -> None:
        """Raise `AttachError`, with the failure because of which it was closed, if it was."""
        if self.engine.channel.is_closed:
            raise AttachError(f"{caller}: {self._feed.ended}. {self.engine.why_stopped}".rstrip())

    @property
    def device(self) -> torch.device:
        """The device of its first tensor."""
        return next(iter(self.engine.state.named().values())).device

    def is_replaceable(self, channel: str) -> bool:
        """Return whether `replace` gives a channel another compressor."""
        return True

    def refusal_of(self, compressor: Compressor) -> SettingsError | None:
        """Return why a compressor cannot average these tensors on this rank; None if it can."""
        try:
            check_compressor_for(compressor, self.engine.state.named(), self.engine.connection)
        except SettingsError as error:
            return error
        return self._feed.refusal_of(compressor)

    def candidate(self, compressor: Compressor | str) -> tuple[Compressor, SettingsError | None]:
        """Return the compressor, and the error if this rank cannot switch to it, for all ranks to learn of."""
        self.check_open("replace")
        if not self.engine.state.named():
            raise AttachError("replace: the parameters' names are not known yet; see PowerSGDState.bind.")
        try:
            candidate = checked_compressor("replace", compressor)
        except SettingsError as refusal:
            return self.compressor, refusal
        return candidate, self.refusal_of(candidate)

    def replace(self, compressor: Compressor | str) -> None:
        """Switch to another compressor from the next step on; see `Handle.replace`."""
        candidate, refusal = self.candidate(compressor)
        self.engine.replace(candidate, self.device, refusal)

    def snapshot(self) -> SavedChannel:
        """Return the state, with the tensors themselves."""
        # Allocate now everything that the state will ever hold: torch.distributed.checkpoint loads only into existing
        # tensors, and may be given the state_dict of a run that has taken no step. And after `replace`, what the next
        # step would start from scratch is saved as it will be.
        lay_out(self.engine, self._feed.sparse)
        return snapshot_of(self.engine, self._feed.bucket_plan())

    def differences(self, saved: SavedChannel, rules: LoadRules) -> list[str]:
        """List every difference between a saved state and this run that would cause an error on loading."""
        return differences(self.engine, saved, rules)

    def restore(self, saved: SavedChannel, rules: LoadRules, fingerprint: str) -> None:
        """Continue from a state that matches, on whose fingerprint all ranks have agreed."""
        restore(self.engine, saved, rules, fingerprint, self._feed.uncut_steps)
        self._feed.load_bucket_plan(saved.bucket_plan)


class Feed(ABC):
    """A source of buckets: a DistributedDataParallel, the modules that FSDP2 shards, tensors that a user names.

    `open_exchange` asks it for its channels and named tensors, makes an engine for each, and calls `plug` once all
    ranks agree; `Handle.close` calls `unplug`. Only `caller`, `label`, `process_group` and `like` have no default.
    """

    caller: ClassVar[str]
    """The function that users call, for errors."""
    way: ClassVar[str] = "open_exchange"
    """The way in, for `open_exchange`: which defaults its options have, and which cannot apply."""
    ended: ClassVar[str] = "this attachment was closed, or its model is gone; attach again"
    """What is said of a handle that is used after its end."""
    label: str
    """The name of its connection in the store: those of one label are paired in the order of their first use."""
    channel_type: ClassVar[type[Channel]] = Channel
    """What is made around each engine."""
    may_be_alone: bool | None = None
    """Whether a process group of one rank is no reason for a warning; None: if it is a dimension of a mesh."""
    may_join: ClassVar[bool] = False
    """True if zeros outside a backward pass come from a rank that has run out of inputs."""
    joins_buckets: bool = False
    """True if each step has the same buckets, the last of them marked, and nobody waits for one before all have come:
    several may then be averaged together under "fifo" too."""
    is_sharded: ClassVar[bool] = False
    """True if its buckets consist of shards, one for each rank."""
    may_be_unused: bool = False
    """True if a step may leave parameters unused on all ranks."""
    sparse: Set[Tensor] = frozenset()
    """The parameters whose gradients are sparse; they have no state."""
    _is_closed = False
    uncut_steps: int = 0
    """The number of steps before buckets have their final layout."""

    @property
    @abstractmethod
    def process_group(self) -> dist.ProcessGroup:
        """The group whose ranks average together, unless the option names another."""

    @abstractmethod
    def like(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the channels, by name, with the named tensors that state is kept for: the same ones at each call."""

    def group_of(self, channel: str) -> dist.ProcessGroup:
        """Return the group whose ranks average a channel, unless the option names another: this one or a part of it.

        Channels of one group share a connection. All ranks have the same channels, in the same order, and the first of
        them is averaged by all if any is.
        """
        return self.process_group

    def title(self, channel: str) -> str:
        """Return a channel's name in errors."""
        return "" if channel == ONLY else channel

    def facts(self, channel: str) -> str:
        """Return what must be the same on every rank, a fact per line: "what: value"."""
        return "\n".join(
            f"parameter {name}: shape {tuple(p.shape)}, {p.dtype}{'' if p.requires_grad else ', frozen'}"
            for name, p in self.like()[channel].items()
        )

    def is_replaceable(self, channel: str) -> bool:
        """Return whether `replace` gives a channel another compressor."""
        return True

    def refusal_of(self, compressor: Compressor) -> SettingsError | None:
        """Return why a compressor cannot average these buckets, beyond its own reasons; None if it can."""
        return None

    def plug(self, channels: Mapping[str, Any]) -> None:  # noqa: B027  # some are called without
        """Have buckets run through the channels' engines from now on; all ranks have agreed.

        If it raises on one rank, all ranks close and raise.
        """

    def unplug(self) -> None:
        """Undo `plug`, also one that failed halfway or was never called; a second call does nothing."""
        self._is_closed = True

    @property
    def is_plugged(self) -> bool:
        """True while buckets run through the channels; of a feed with nothing to plug in, until `unplug`."""
        return not self._is_closed

    def averaged_by(self, channel: Channel) -> Mapping[Tensor, str]:
        """Return the parameters whose gradients a channel averages, with their names, for `Handle.watch`."""
        raise SettingsError(f"{self.caller}: watch needs a model, whose gradients are averaged.")

    def guard_of(self, channel: Channel) -> Guard | None:
        """Return the guard of a channel's parameters; None if they cannot differ between ranks."""
        if channel.engine.connection.world_size > 1:
            raise SettingsError(
                f"{self.caller}: watch needs a guard, which tells whether gradients were averaged: define guard_of "
                "besides averaged_by; it may return a ReductionsGuard."
            )
        return None

    def saved_as(self, channel: str) -> str:
        """Return a channel's name in saved state, where those of all ranks lie side by side."""
        return channel

    def is_own(self, saved: str) -> bool:
        """Return whether this rank loads a channel of a checkpoint; it skips those of ranks with another shard."""
        return True

    def memory(self, channels: Iterable[Channel]) -> MemoryReport:
        """Return the bytes that the channels and the feed use, by purpose."""
        reports = [one.memory() for one in channels]
        return added(reports, sum(report.gradients for report in reports))

    def bucket_plan(self) -> dict[str, Any]:
        """Return the layout of buckets, to be saved."""
        return {}

    def load_bucket_plan(self, plan: Mapping[str, Any]) -> None:  # noqa: B027  # most feeds have none
        """Lay out buckets as they were when they were saved."""
