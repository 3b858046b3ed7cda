"""N workers in one process: a collective runs when every worker has brought its own.

Sums run in rank order, so at two workers they are, bit for bit, what a ring computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.communicators.collective import Collective
from commhooks.errors import CollectiveError


class LockstepGroup:
    """`world_size` workers that live in this process."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"LockstepGroup(world_size={world_size}): world_size must be at least 1.")
        self.world_size = world_size
        self._rounds: dict[int, dict[int, LockstepPending]] = {}

    def communicators(self) -> list[LockstepCommunicator]:
        """Return one communicator for each worker, in rank order."""
        return [LockstepCommunicator(self, rank) for rank in range(self.world_size)]

    def join(self, round_number: int, rank: int, pending: LockstepPending) -> None:
        """Bring one worker's collective to a round; the last worker to come carries the round out."""
        present = self._rounds.setdefault(round_number, {})
        present[rank] = pending
        if len(present) < self.world_size:
            return
        del self._rounds[round_number]
        workers = [present[rank] for rank in range(self.world_size)]
        for worker, answer in zip(workers, run_collective([one.collective for one in workers]), strict=True):
            worker.answer = answer


class LockstepCommunicator:
    """One worker's end of a `LockstepGroup`."""

    def __init__(self, group: LockstepGroup, rank: int) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self._group = group
        self._round = 0

    def start(self, collective: Collective) -> LockstepPending:
        """Bring this worker's collective to its next round."""
        if collective.group is not None:
            raise CollectiveError(f"this run has no group {collective.group!r} of ranks, which a request names.")
        pending = LockstepPending(collective, self.rank)
        self._group.join(self._round, self.rank, pending)
        self._round += 1
        return pending


class LockstepPending:
    """One worker's collective, to be waited for only once all workers have brought theirs."""

    def __init__(self, collective: Collective, rank: int) -> None:
        self.collective = collective
        self.rank = rank
        self.answer: Tensor | None = None

    @property
    def result(self) -> Tensor:
        """The answer."""
        if self.answer is None:
            raise CollectiveError(
                f"lockstep: rank {self.rank} asked for a result before every worker brought its request."
            )
        return self.answer

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return if every worker has come; raise `CollectiveError` if not, since none can come while this one waits."""
        _ = self.result


def run_collective(collectives: Sequence[Collective]) -> list[Tensor]:
    """Carry out one collective that every worker, in rank order, has brought; return each worker's answer."""
    expected = _describe(collectives[0])
    for rank, one in enumerate(collectives):
        if _describe(one) != expected:
            raise CollectiveError(f"lockstep: rank 0 asked for {expected}, rank {rank} for {_describe(one)}.")
    kind, ranks = collectives[0].kind, range(len(collectives))
    tensors = [one.tensor for one in collectives]
    if kind == "all-reduce":
        total = _sum(tensors)
        return [total if tensor.is_sparse else tensor.copy_(total) for tensor in tensors]
    if kind == "all-gather":
        everything = torch.stack(tensors)
        return [everything.clone() for _ in ranks]
    if kind == "all-to-all":
        everything = torch.stack(tensors, dim=1)
        return [everything[rank].clone() for rank in ranks]
    return [_sum([tensor[rank] for tensor in tensors]) for rank in ranks]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total


def _describe(one: Collective) -> str:
    shape = "sparse" if one.tensor.is_sparse else tuple(one.tensor.shape)
    return f"{one.kind} {shape} {one.tensor.dtype}"
