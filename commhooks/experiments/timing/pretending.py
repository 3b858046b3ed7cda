"""A communicator that starts nothing, and answers every collective at once with what this rank put in.

What a hook costs then remains, and what its transfers cost is gone: answers have their real sizes, but every rank
counts as having sent the same as this one.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from commhooks.communicators.collective import Collective, Communicator
from commhooks.errors import SettingsError
from commhooks.exchange.feed import Channel
from commhooks.exchange.handle import Handle
from commhooks.exchange.options import settings_of
from commhooks.hooks.attach import DDPFeed
from commhooks.language.compressor import Compressor
from commhooks.scheduling.connection import ProcessGroupConnection
from commhooks.scheduling.policy import PolicyName


class Watcher(Protocol):
    """An observer of collectives, called by the thread that starts them."""

    def starting(self, collective: Collective) -> None:
        """Take note that a collective is about to be answered."""
        ...

    def has_started(self) -> None:
        """Take note that it has been."""
        ...

    def answered(self) -> None:
        """Take note that its answer is waited for."""
        ...


class PretendingCommunicator:
    """One of `world_size` ranks, the others of which do not exist.

    An all-reduce returns its input, as if the others had sent zeros, so that means stay finite. Other collectives
    return new memory, as a process group does; with `in_place` they return views of their input, which take no memory
    however many ranks there are.
    """

    def __init__(self, rank: int, world_size: int, watcher: Watcher | None = None, *, in_place: bool = False) -> None:
        self.rank = rank
        self.world_size = world_size
        self._watcher = watcher
        self._in_place = in_place

    def start(self, collective: Collective) -> Pretended:
        """Answer a collective.

        Raises:
            SettingsError: It is among some of the ranks only.

        """
        if collective.group is not None:
            raise SettingsError(
                f"a collective among {collective.group.kind} ranks only has no place in a profile, and is not "
                "modelled; give the compressor inside Hierarchical, with the ranks of each host and the rate inside."
            )
        if self._watcher is not None:
            self._watcher.starting(collective)
        answer = self._answer(collective)
        if self._watcher is not None:
            self._watcher.has_started()
        return Pretended(answer, self._watcher)

    def _answer(self, collective: Collective) -> Tensor:
        tensor = collective.tensor
        if collective.kind == "all-reduce":
            return tensor
        answer = tensor
        if collective.kind == "all-gather":
            answer = tensor.expand(self.world_size, *tensor.shape)
        elif collective.kind == "all-to-all":  # other rows may hold what only their own rank can decode
            answer = tensor[self.rank].expand_as(tensor)
        elif collective.kind == "reduce-scatter":
            answer = tensor[self.rank]
        return answer if self._in_place else answer.clone(memory_format=torch.contiguous_format)


class PretendingConnection(ProcessGroupConnection):
    """A connection on which a rank compresses as one of `world_size`, and nothing is sent."""

    def __init__(
        self, group: dist.ProcessGroup, world_size: int, watcher: Watcher | None = None, *, policy: PolicyName = "fifo"
    ) -> None:
        pretend = functools.partial(_pretending, world_size, watcher)
        super().__init__(group, policy=policy, wrap_communicator=pretend, may_bypass=True)
        self.world_size = world_size


def _pretending(world_size: int, watcher: Watcher | None, inner: Communicator) -> PretendingCommunicator:
    return PretendingCommunicator(inner.rank, world_size, watcher)


def attach_pretending(ddp: Module, compressor: Compressor, connection: PretendingConnection) -> Handle[Channel]:
    """Attach a compressor to a DistributedDataParallel, on a connection that sends nothing."""
    settings = settings_of("attach", {"policy": connection.policy})
    return Handle[Channel](DDPFeed(ddp, ddp, None), compressor, settings, connection).open()


class Pretended:
    """A collective that is answered."""

    def __init__(self, result: Tensor, watcher: Watcher | None) -> None:
        self.result = result
        self._watcher = watcher

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return at once: the answer is there."""
        if self._watcher is not None:
            self._watcher.answered()
