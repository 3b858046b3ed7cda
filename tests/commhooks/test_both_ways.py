"""Large exchanges over two groups, one for each direction."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from commhooks.communicators import Collective, Communicator, Pending
from commhooks.communicators.both_ways import goes_both_ways
from commhooks.communicators.private_group import Address, PrivateGroup
from commhooks.language.requests import Group
from tests.world import on_ranks

KB = 1024
DTYPES = (torch.uint8, torch.int32, torch.float32, torch.bfloat16)


def connect() -> tuple[PrivateGroup, Communicator]:
    """Return a private group of the default group's ranks, and its communicator."""
    group = torch.distributed.group.WORLD
    assert group is not None
    private_group = PrivateGroup(Address.under(group, "both ways"))
    assert private_group.communicator is not None
    return private_group, private_group.communicator


def message(rank: int, ranks: int, turn: int, row: int) -> Tensor:
    """Return `ranks` rows of random bytes as some dtype: equal on all ranks that ask for the same."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    bits = torch.randint(0, 256, (ranks, row), dtype=torch.uint8, generator=generator)
    return bits.view(DTYPES[turn % len(DTYPES)])


@on_ranks("ranks")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exchanges_of_every_size_bring_what_was_sent_however_many_are_under_way(rank: int, ranks: int) -> None:
    private_group, communicator = connect()
    sent, started = [], []
    for turn, row in enumerate([4, 16 * KB, 128 * KB, 300 * KB, 8, 256 * KB, 16 * KB - 4]):
        sent.append(message(rank, ranks, turn, row))
        exchange, gather = Collective("all-to-all", sent[-1]), Collective("all-gather", sent[-1][0])
        total = Collective("all-reduce", torch.full((row,), float(rank)))
        started.append([communicator.start(one) for one in (exchange, gather, total)])
        if len(started) == 2:
            time.sleep(0.02 * rank)  # ranks come at different times
    for turn, (exchanged, gathered, total_pending) in enumerate(started):
        own = sent[turn]
        everyone = [message(other, ranks, turn, own.element_size() * own[0].numel()) for other in range(ranks)]
        for pending, expected in (
            (exchanged, torch.stack([theirs[rank] for theirs in everyone])),
            (gathered, torch.stack([theirs[0] for theirs in everyone])),
        ):
            wait(pending)
            assert torch.equal(pending.result.view(torch.uint8), expected.view(torch.uint8)), turn
        total_pending.wait()
        assert bool((total_pending.result == sum(range(ranks))).all())
    assert len(private_group.groups) == 2
    assert private_group.close(5.0)


def wait(pending: Pending) -> None:
    """Wait in slices, as the scheduler does."""
    while True:
        try:
            pending.wait(0.005)
        except TimeoutError:
            continue
        return


@on_ranks(4)
def test_groups_of_some_ranks_have_a_second_group_too(rank: int) -> None:
    private_group, communicator = connect()
    for kind in ("inner", "outer"):
        group = Group(kind, 2)
        ranks = group.ranks(rank, 4)
        own = message(rank, 2, 0, 64 * KB)
        pending = communicator.start(Collective("all-to-all", own, group=group))
        wait(pending)
        place = ranks.index(rank)
        assert torch.equal(pending.result, torch.stack([message(other, 2, 0, 64 * KB)[place] for other in ranks]))
    assert len(private_group.groups) == 5
    assert private_group.close(5.0)


@pytest.mark.parametrize(
    ("kind", "payload", "ranks", "both_ways"),
    [
        ("all-to-all", 32 * KB, 2, True),
        ("all-to-all", 32 * KB - 2, 2, False),
        ("all-gather", 16 * KB, 2, True),
        ("all-gather", 16 * KB - 1, 2, False),
        ("all-to-all", 512 * KB, 4, True),
        ("all-to-all", 512 * KB - 4, 4, False),
        ("all-gather", 512 * KB, 4, False),
        ("all-reduce", 512 * KB, 2, False),
        ("all-to-all", 512 * KB, 1, False),
    ],
)
def test_the_size_alone_says_what_goes_over_two_groups(kind: str, payload: int, ranks: int, both_ways: bool) -> None:
    assert goes_both_ways(kind, payload, ranks) is both_ways
