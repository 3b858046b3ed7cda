"""What differs between the ways in: the tensors that state is kept for, who calls with what memory, what to undo."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from commhooks.errors import SettingsError
from commhooks.exchange.channel import Channel
from commhooks.language.compressor import Compressor
from commhooks.scheduling.ledger import Statistics
from commhooks.state.memory import MemoryReport, added
from ddp_core.guard import Guard

if TYPE_CHECKING:
    from commhooks.exchange.handle import Handle

ONLY = "gradients"
"""The channel of a feed that has one; its state is saved without the name."""


class Feed(ABC):
    """A source of buckets: a DistributedDataParallel, the modules that FSDP2 shards, tensors that a user names.

    `open_exchange` asks it for its channels and named tensors, makes an engine for each, and calls `plug` once all
    ranks agree; `Handle.close` calls `unplug`.
    """

    caller: ClassVar[str]
    """The function that users call, for errors and defaults."""
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
    is_sharded: ClassVar[bool] = False
    """True if its buckets consist of shards, one for each rank."""
    may_be_unused: bool = False
    """True if a step may leave parameters unused on all ranks."""
    sparse: Set[Tensor] = frozenset()
    """The parameters whose gradients are sparse; they have no state."""
    uncut_steps: int = 0
    """The number of steps before buckets have their final layout."""

    @property
    @abstractmethod
    def process_group(self) -> dist.ProcessGroup:
        """The group whose ranks average together, unless the option names another."""

    @abstractmethod
    def like(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the channels, by name, with the named tensors that state is kept for."""

    def title(self, channel: str) -> str:
        """Return a channel's name in errors."""
        return "" if channel == ONLY else channel

    def facts(self, channel: str) -> str:
        """Return what must be the same on every rank, a fact per line: "what: value"."""
        return "\n".join(
            f"parameter {name}: shape {tuple(p.shape)}, {p.dtype}{'' if p.requires_grad else ', frozen'}"
            for name, p in self.like()[channel].items()
        )

    def refusal_of(self, compressor: Compressor) -> SettingsError | None:
        """Return why a compressor cannot average these buckets, beyond its own reasons; None if it can."""
        return None

    @abstractmethod
    def plug(self, handle: Handle[Any]) -> None:
        """Have buckets run through the handle's channels from now on."""

    @abstractmethod
    def unplug(self) -> None:
        """Undo `plug`; a second call does nothing."""

    @property
    @abstractmethod
    def is_plugged(self) -> bool:
        """True while buckets run through the channels."""

    def averaged_by(self, channel: Channel) -> Mapping[Tensor, str]:
        """Return the parameters whose gradients a channel averages, with their names, for `Handle.watch`."""
        raise SettingsError(f"{self.caller}: watch needs a model, whose gradients are averaged.")

    def guard_of(self, channel: Channel) -> Guard | None:
        """Return the guard of a channel's parameters; None if they cannot differ between ranks."""
        return None

    def is_own(self, channel: str) -> bool:
        """Return whether this rank loads a channel of a checkpoint; it skips those of ranks with another shard."""
        return True

    def summary(self) -> Sequence[str]:
        """Return lines about what the feed itself sends besides."""
        return []

    def statistics(self) -> Sequence[Statistics]:
        """Return the counts of what the feed itself sends besides."""
        return []

    def memory(self, channels: Iterable[Channel]) -> MemoryReport:
        """Return the bytes that the channels and the feed use, by purpose."""
        reports = [one.memory() for one in channels]
        return added(reports, sum(report.gradients for report in reports))

    def bucket_plan(self) -> dict[str, Any]:
        """Return the layout of buckets, to be saved."""
        return {}

    def load_bucket_plan(self, plan: Mapping[str, Any]) -> None:  # noqa: B027  # most feeds have none
        """Lay out buckets as they were when they were saved."""
