"""N workers in one process: requests are answered when every worker has brought its own.

Sums run in rank order, so at two workers they are, bit for bit, what a ring computes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from commhooks.errors import CollectiveError
from commhooks.language.requests import AllGather, AllReduce, AllToAll, Request

Result = TypeVar("Result")


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
        """Bring one worker's request to a round; the last worker to come carries the round out."""
        present = self._rounds.setdefault(round_number, {})
        present[rank] = pending
        if len(present) < self.world_size:
            return
        del self._rounds[round_number]
        workers = [present[rank] for rank in range(self.world_size)]
        for worker, answer in zip(workers, answer_requests([worker.request for worker in workers]), strict=True):
            worker.answer = answer


class LockstepCommunicator:
    """One worker's end of a `LockstepGroup`."""

    def __init__(self, group: LockstepGroup, rank: int) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self._group = group
        self._round = 0

    def start(self, request: Request) -> LockstepPending:
        """Bring this worker's request to its next round."""
        pending = LockstepPending(request, self.rank)
        self._group.join(self._round, self.rank, pending)
        self._round += 1
        return pending


class LockstepPending:
    """One worker's request, to be waited for only once all workers have brought theirs."""

    def __init__(self, request: Request, rank: int) -> None:
        self.request = request
        self.rank = rank
        self.answer: Tensor | None = None

    @property
    def result(self) -> Tensor:
        """The answer to the request."""
        if self.answer is None:
            raise CollectiveError(
                f"lockstep: rank {self.rank} asked for a result before every worker brought its request."
            )
        return self.answer

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return if every worker has come; raise `CollectiveError` if not, since none can come while this one waits."""
        _ = self.result


def run_lockstep(exchanges: Sequence[Generator[Request, Tensor, Result]]) -> list[Result]:
    """Drive one exchange per worker, round by round, and return what each of them returned, in rank order."""
    results: dict[int, Result] = {}
    requests = [_advance(exchange, None, rank, results) for rank, exchange in enumerate(exchanges)]
    while not results:
        answers = answer_requests([request for request in requests if request is not None])
        requests = [_advance(exchanges[rank], answer, rank, results) for rank, answer in enumerate(answers)]
    if len(results) != len(exchanges):
        raise CollectiveError(
            f"lockstep: ranks {sorted(results)} were done while the others still asked for collectives."
        )
    return [results[rank] for rank in range(len(exchanges))]


def _advance(
    exchange: Generator[Request, Tensor, Result], answer: Tensor | None, rank: int, results: dict[int, Result]
) -> Request | None:
    try:
        return next(exchange) if answer is None else exchange.send(answer)
    except StopIteration as stop:
        results[rank] = stop.value
        return None


def answer_requests(requests: Sequence[Request]) -> list[Tensor]:
    """Carry out one collective for which every worker, in rank order, brought its request."""
    _check_alike(requests)
    first = requests[0]
    if isinstance(first, AllReduce):
        return _sum([request for request in requests if isinstance(request, AllReduce)])
    if isinstance(first, AllGather):
        return [torch.stack([request.tensor for request in requests]) for _ in requests]
    if isinstance(first, AllToAll):
        return [torch.stack([request.tensor[rank] for request in requests]) for rank in range(len(requests))]
    raise CollectiveError(f"lockstep: expected an AllReduce, AllGather or AllToAll (got {type(first).__name__}).")


def _sum(requests: Sequence[AllReduce]) -> list[Tensor]:
    payloads = [request.to_wire(len(requests)) for request in requests]
    total = payloads[0].clone()
    for payload in payloads[1:]:
        total.add_(payload)
    return [request.from_wire(total) for request in requests]


def _check_alike(requests: Sequence[Request]) -> None:
    expected = _describe(requests[0])
    for rank, request in enumerate(requests):
        if _describe(request) != expected:
            raise CollectiveError(f"lockstep: rank 0 asked for {expected}, rank {rank} for {_describe(request)}.")


def _describe(request: Request) -> str:
    shape = "sparse" if request.tensor.is_sparse else tuple(request.tensor.shape)
    manner = (request.average, request.wire) if isinstance(request, AllReduce) else ()
    return f"{request.kind} {shape} {request.tensor.dtype} {manner}"
