"""N workers in one process: a collective runs once every worker has submitted its own.

Sums run in rank order, so with two workers they are, bit for bit, what a ring computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.communicators.collective import Collective
from commhooks.errors import CollectiveError
from commhooks.language.requests import Group


class LockstepGroup:
    """`world_size` workers that live in this process."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"LockstepGroup(world_size={world_size}): world_size must be at least 1.")
        self.world_size = world_size
        self._rounds: dict[tuple[range, Group | None, int], dict[int, LockstepPending]] = {}

    def communicators(self) -> list[LockstepCommunicator]:
        """Return one communicator for each worker, in rank order."""
        return [LockstepCommunicator(self, rank) for rank in range(self.world_size)]

    def join(self, round_number: int, rank: int, pending: LockstepPending) -> None:
        """Add one worker's collective to a round of its group; the last worker to arrive runs the round."""
        group = pending.collective.group
        ranks = range(self.world_size) if group is None else group.ranks(rank, self.world_size)
        present = self._rounds.setdefault((ranks, group, round_number), {})
        present[rank] = pending
        if len(present) < len(ranks):
            return
        del self._rounds[ranks, group, round_number]
        workers = [present[rank] for rank in ranks]
        for worker, answer in zip(workers, run_collective([one.collective for one in workers], ranks), strict=True):
            worker.answer = answer


class LockstepCommunicator:
    """A worker's communicator in a `LockstepGroup`."""

    def __init__(self, group: LockstepGroup, rank: int) -> None:
        self.rank = rank
        self.world_size: int = group.world_size
        self._group = group
        self._rounds: Counter[Group | None] = Counter()

    def start(self, collective: Collective) -> LockstepPending:
        """Submit this worker's collective to the next round of its group."""
        pending = LockstepPending(collective, self.rank)
        self._group.join(self._rounds[collective.group], self.rank, pending)
        self._rounds[collective.group] += 1
        return pending


class LockstepPending:
    """A worker's collective; wait for it only after all workers have submitted theirs."""

    def __init__(self, collective: Collective, rank: int) -> None:
        self.collective = collective
        self.rank = rank
        self.answer: Tensor | None = None

    @property
    def result(self) -> Tensor:
        """The answer."""
        if self.answer is None:
            raise CollectiveError(
                f"lockstep: rank {self.rank} asked for a result before every worker submitted its request."
            )
        return self.answer

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return if every worker has submitted; otherwise raise `CollectiveError`: none can while this one waits."""
        _ = self.result


def run_collective(collectives: Sequence[Collective], ranks: Sequence[int] | None = None) -> list[Tensor]:
    """Run one collective that every worker has submitted, in rank order; return each worker's answer."""
    ranks = range(len(collectives)) if ranks is None else ranks
    expected = _describe(collectives[0])
    for rank, one in zip(ranks, collectives, strict=True):
        if _describe(one) != expected:
            raise CollectiveError(f"lockstep: rank {ranks[0]} asked for {expected}, rank {rank} for {_describe(one)}.")
    kind, places = collectives[0].kind, range(len(collectives))
    tensors = [one.tensor for one in collectives]
    if kind == "all-reduce":
        if tensors[0].is_sparse:
            total = _sum(tensors)
            return [total for _ in places]
        total = _add_up(tensors)
        return [total, *(tensor.copy_(total) for tensor in tensors[1:])]
    if kind == "all-gather":
        return [torch.stack(tensors, out=one.room) for one in collectives]
    if kind == "all-to-all":
        return [torch.stack([tensor[place] for tensor in tensors], out=collectives[place].room) for place in places]
    return [_sum([tensor[place] for tensor in tensors]) for place in places]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return _add_up([tensors[0].clone(), *tensors[1:]])


def _add_up(tensors: Sequence[Tensor]) -> Tensor:
    """Add all to the first, and return that."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total


def _describe(one: Collective) -> str:
    shape = "sparse" if one.tensor.is_sparse else tuple(one.tensor.shape)
    return f"{one.kind} {shape} {one.tensor.dtype}"
