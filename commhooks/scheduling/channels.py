"""The channels of a connection: engines that share a thread and a group, each with its own order, counts and name.

A unit is a bucket (fifo) or a step (fused) of one channel; it takes its place on the connection when its last bucket is
handed in. All requests of a unit are issued before the next unit's first, so the order of collectives is the order of
submission, whatever has arrived. Ranks must hand units in in one order. Before each unit, a connection of several
channels therefore compares whose turn it is: every rank gathers `HEADER_BYTES` from each other rank. A connection of
one channel, such as an attachment's, sends only its requests. On NCCL the host reads most of what is gathered late, see
`Turns`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from commhooks.communicators import Collective, Communicator, Pending, RecordingCommunicator
from commhooks.communicators.collective import Traffic
from commhooks.communicators.kernels import Kernels
from commhooks.devices import copied_to
from commhooks.errors import CollectiveError, CommHooksError
from commhooks.scheduling.ledger import Ledger
from commhooks.scheduling.policy import POLICIES, Finish, Policy, PolicyName, Wait
from commhooks.scheduling.task import BucketTask
from commhooks.scheduling.turns import Turns, spoil

HEADER_BYTES = 32
"""The size of a header, equal to that of a comparison of settings, so that the two can meet and be told apart."""
_MAGIC = 0x636F6D6D686F6F6B
"""The first number of a header: no digest of settings begins with it, but by one chance in 2^64."""


class ConnectionChannel:
    """An engine's place on a connection."""

    def __init__(self, ordinal: int = 0, name: str = "", policy: PolicyName = "fifo") -> None:
        self.ordinal = ordinal
        """How many channels of its name the connection had before."""
        self.name = name
        """The name of the tensors averaged on it, such as a fragment of a model; messages then call its steps
        rounds."""
        self.ledger: Ledger = Ledger()
        self.opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done when the channel is open on every rank; holds the error that prevented it."""
        self.policy: Policy | None = None
        """The order of its collectives; None before the channel is open, and after its end."""
        self.traffic: Traffic | None = None
        self.refusal: CommHooksError | None = None
        """The error if ranks disagreed when the channel was to open. Every task handed in then fails."""
        self.kernels: Kernels = Kernels()
        """What ranks compare, with their settings, of the kernels that compute for the channel."""
        self.is_first = False
        """True if it is open, and was the first one on its connection."""
        self.is_closed = False
        """True once it takes no more tasks; those handed in continue."""
        self.differs: Tensor | None = None
        """A flag on the device, true if a rank hands in another unit than the current one; None if none does."""
        self._make_policy = POLICIES[policy]
        self._complete: Finish

    @property
    def title(self) -> str:
        """The channel's name in messages."""
        return self.name or f"channel {self.ordinal}"

    @property
    def unique(self) -> str:
        """Its name among all channels of its connection, which ranks compare."""
        return f"{self.title}, {self.ordinal}" if self.name and self.ordinal else self.title

    @functools.cached_property
    def digest(self) -> int:
        """A number that stands for name and ordinal: not the channel's place, which ranks may count differently."""
        # Not for `unique`: another channel may be named "a, 1", or "channel 0".
        return int.from_bytes(hashlib.blake2b(repr((self.name, self.ordinal)).encode(), digest_size=7).digest())

    def at(self, step: int) -> str:
        """Return the name, in messages, of one of its steps, with the channel."""
        return f"round {step}, {self.name}" if self.name else f"{self.title}, step {step}"

    def open(self, communicator: Communicator, wait: Wait, complete: Finish) -> Policy:
        """Connect the channel, with counts of its own, and return its policy; see `ConnectionChannels.open`."""
        recording = RecordingCommunicator(communicator)
        self.traffic, self._complete = recording.traffic, complete
        self.policy = self._make_policy(recording, wait, self._finish)
        self.opened.set_result(None)
        return self.policy

    def working_memory(self) -> list[Tensor]:
        """Return the tensors that are kept between steps."""
        return [] if self.policy is None else self.policy.working_memory()

    def _finish(self, task: BucketTask) -> None:
        assert self.traffic is not None, "a task is finished before its channel is open"
        if self.differs is not None:
            for member in task.bucket.members:  # first: an undo log judges the means
                spoil(member, self.differs)
        task.settle()
        self.ledger.enter(task, self.traffic)
        self._complete(task)


@dataclasses.dataclass(frozen=True)
class _Check:
    """The comparison of whose turn it is, and the task that waits for it."""

    channel: ConnectionChannel
    task: BucketTask
    header: Tensor
    sent: Tensor
    """The header on the gradients' device."""
    pending: Pending


class ConnectionChannels:
    """The opened channels of one connection, served in the order in which their units were handed in.

    If there is a `look_around`, headers are read late, and it is called while the host waits for them.
    """

    def __init__(self, rank: int, wait: Wait, look_around: Callable[[], None] | None = None) -> None:
        self._rank = rank
        self._wait = wait
        self._turns = Turns(self._compare, look_around) if look_around is not None else None
        self._channels: list[ConnectionChannel] = []
        self._policies: list[Policy] = []
        self._check: _Check | None = None
        self._issuing: ConnectionChannel | None = None
        """The channel whose unit was placed last."""

    def open(self, channel: ConnectionChannel, communicator: Communicator, complete: Finish) -> None:
        """Open a channel, between two units; `complete` passes a task's mean to its future."""
        channel.is_first = not self._channels
        self._policies.append(channel.open(communicator, self._wait, complete))
        self._channels.append(channel)

    def add(self, channel: ConnectionChannel, task: BucketTask) -> bool:
        """Add a task; return False, without adding it, if requests of an earlier unit must be issued first."""
        policy = channel.policy
        assert policy is not None, "the channel is not open"
        if len(self._channels) > 1 and policy.ends_unit(task):
            issuing = self._issuing.policy if self._issuing is not None else None
            if self._check is not None or (issuing is not None and issuing.is_issuing):
                return False
            if self._turns is not None:  # before a collective that ranks which have failed will not answer
                self._turns.look()
            self._issuing = channel
            header = torch.tensor(
                [_MAGIC, channel.digest, task.step, task.bucket.index], dtype=torch.int64, device="cpu"
            )
            sent = copied_to(task.bucket.memory.device, header)
            pending = policy.communicator.start(Collective("all-gather", sent))
            self._check = _Check(channel, task, header, sent, pending)
        else:
            policy.add(task)
        return True

    def turn(self) -> bool:
        """Do one thing; return False if there is nothing to do before something else is handed in."""
        if self._check is not None:
            self._go_on_with(self._check)
            return True
        if len(self._policies) == 1:
            return self._policies[0].turn()
        first = self._issuing.policy if self._issuing is not None else None
        return (first is not None and first.turn()) or any(policy.turn() for policy in self._policies)

    @property
    def are_none(self) -> bool:
        """True if no channel is open yet."""
        return not self._channels

    @property
    def is_idle(self) -> bool:
        """True if every unit that was placed has ended; a step whose last bucket has not come is not placed yet."""
        return self._check is None and not any(policy.is_working for policy in self._policies)

    def unfinished(self) -> list[BucketTask]:
        """Return every task whose future is not completed."""
        if len(self._policies) == 1:
            return self._policies[0].unfinished()
        waiting = [self._check.task] if self._check is not None else []
        return [task for policy in self._policies for task in policy.unfinished()] + waiting

    def touching(self) -> tuple[ConnectionChannel, BucketTask] | None:
        """Return the task in progress, to which errors are attributed, and its channel."""
        if self._check is not None:
            return self._check.channel, self._check.task
        for channel in (*([self._issuing] if self._issuing is not None else []), *self._channels):
            if channel.policy is not None and channel.policy.touching is not None:
                return channel, channel.policy.touching
        return None

    def where(self, channel: ConnectionChannel, task: BucketTask) -> str:
        """Name rank, channel, step and bucket, for messages; an unnamed channel only if there are several."""
        is_alone = len(self._channels) == 1 and not channel.name
        return task.where(f"rank {self._rank}, {f'step {task.step}' if is_alone else channel.at(task.step)}")

    def release(self) -> None:
        """Drop the channels' connections."""
        for channel in self._channels:
            channel.policy = None
        self._policies, self._check, self._issuing = [], None, None  # the channels stay, for messages

    def read_headers(self, look_around: Callable[[], None] | None = None) -> None:
        """Wait for all headers that are still to be read; raise `CollectiveError` if ranks differ."""
        if self._turns is not None:
            self._turns.read(look_around=look_around)

    def _go_on_with(self, check: _Check) -> None:
        """Issue the unit, if whose turn it is has been compared or will be later; see `Turns.take`."""
        if not self._wait(check.pending):
            return
        of_ranks = check.pending.result.view(torch.int64)
        if self._turns is None:
            self._compare(check.header, of_ranks.cpu())
        else:
            check.channel.differs = self._turns.take(check.header, check.sent, of_ranks)
        self._check = None
        assert check.channel.policy is not None, "the channel is open"
        check.channel.policy.add(check.task)

    def _compare(self, own: Tensor, of_ranks: Tensor) -> None:
        """Raise `CollectiveError`, naming the turns, unless it was every rank's turn."""
        if bool((of_ranks == own).all()):
            return
        raise CollectiveError(
            "ranks hand in different things: " + "; ".join(self._described(of_ranks.tolist())) + ". Every rank must "
            "hand in the steps of the channels of one connection in the same order."
        )

    def _described(self, of_ranks: list[list[int]]) -> Iterator[str]:
        channels = {channel.digest: channel for channel in self._channels}
        for rank, (magic, digest, step, bucket) in enumerate(of_ranks):
            what = (
                f"{channels[digest].at(step)}, bucket {bucket}"
                if digest in channels
                else f"step {step} of another channel"
            )
            yield f"rank {rank}: {what}" if magic == _MAGIC else f"rank {rank}: settings to compare"
