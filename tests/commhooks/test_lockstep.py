"""Gloo is what lockstep says, on four ranks too."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commhooks.state.table import StateTable
from tests import bounds
from tests.cases import BY_NAME, EACH_FORM_ONCE
from tests.commhooks.mirrored import Mirrored, backward, largest_error
from tests.commhooks.models import digest_of
from tests.commhooks.ranks import of_every_rank
from tests.commhooks.workers import largest, normal, relative
from tests.world import on_ranks

pytestmark = pytest.mark.kernels


@on_ranks(4, check_exit=True)
@EACH_FORM_ONCE
def test_on_four_ranks_every_step_of_every_case_is_lockstep_but_for_the_order_of_summation(
    rank: int, kind: str, policy: str, names: list[str]
) -> None:
    """Make four steps over Gloo, and on one rank each in lockstep, from the state that all ranks had.

    In float64, where what products multiply rounding by cannot show. Errors are relative to the largest element of any
    rank's gradients, and of what is remembered.
    """
    dawdling, world_size = random.Random(rank), dist.get_world_size()
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
        assert len(set(of_every_rank(tuple(digests)))) == (1 if case.exchanges else world_size), case.name
        if case.wire is None:
            assert max(mean, state) <= bounds.IN_FLOAT64, case.name
        elif not case.rank:
            # A narrow wire rounds after every term, so the order of a sum shows; in no rank's own cast, which is owed.
            assert mean <= 2 * bounds.of_mean(4, case.wire) and state == 0, case.name
        # What a wire rounds of factors is bounded by their conditioning alone. At two ranks no order shows: test_hooks.
        both.attachment.close()


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
