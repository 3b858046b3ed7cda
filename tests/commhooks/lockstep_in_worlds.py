"""What the tests of Gloo against lockstep, on more than two ranks, run on every rank."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.state.table import StateTable
from tests.cases import BY_NAME
from tests.commhooks.mirrored import Mirrored, backward, largest_error
from tests.commhooks.models import digest_of
from tests.commhooks.workers import largest, normal, relative


@dataclasses.dataclass(frozen=True)
class Compared:
    """How far one case's steps were from lockstep, on the rank that looked."""

    mean: float
    """The largest error of a mean, relative to the largest element of any rank's gradients."""
    state: float
    """That of what is remembered, relative to its largest element."""
    digests: list[bytes]
    """Of each step's gradients."""


def every_case(rank: int, kind: str, policy: str, names: Sequence[str]) -> dict[str, Compared]:
    """Make four steps of these cases over Gloo, and on one rank each in lockstep, from the state that all ranks had.

    In float64, where what products multiply rounding by cannot show.
    """
    dawdling, world_size = random.Random(rank), dist.get_world_size()
    compared = {}
    for number, case in enumerate(map(BY_NAME.__getitem__, names)):
        looking = number % world_size
        both = Mirrored(kind, case.make(), policy, world_size, torch.float64)
        mean, state, digests = 0.0, 0.0, []
        for step in range(4):
            time.sleep(dawdling.random() * 0.01)
            gradients = normal(both.workers.parameters, world_size, seed=step)
            if rank == looking:
                ours, expected = both.step(gradients)
                of_any_rank = largest(*(gradient for own in gradients for gradient in own))
                mean = max(mean, largest_error(ours, expected) / of_any_rank)
            else:
                ours = backward(both.model, gradients[rank])
            state = max(state, _take_over_state(both, looking))
            digests.append(digest_of(ours))
        compared[case.name] = Compared(mean, state, digests)
        both.attachment.detach()
    return compared


def _take_over_state(both: Mirrored, looking: int) -> float:
    """Put every rank's state into its worker on the rank that looks; return how far the workers' own was from it."""
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == looking else None
    dist.gather_object(_tensors(both.attachment.state, list(both.model.parameters())), gathered, dst=looking)
    worst = 0.0
    for table, theirs in zip(both.workers.states, gathered, strict=True) if gathered else []:
        mine = _tensors(table, both.workers.parameters)
        assert mine.keys() == theirs.keys()
        for key, tensor in mine.items():
            worst = max(worst, relative(tensor - theirs[key], theirs[key]))
            tensor.copy_(theirs[key])
    return worst


def _tensors(table: StateTable, parameters: list[Tensor]) -> dict[tuple[int, str], Tensor]:
    states = [table.of(parameter) for parameter in parameters]
    return {(index, name): tensor for index, state in enumerate(states) for name, tensor in state.tensors.items()}
