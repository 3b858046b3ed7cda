"""Channels of one connection over NCCL: how often the host waits for whose turn it is, and another order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks import Exchanger
from commhooks.errors import CheckpointError, CollectiveError
from commhooks.scheduling.connection import ProcessGroupConnection
from commhooks.scheduling.turns import Turns
from tests.virtual_device import ranks, training
from tests.virtual_device.device import extension
from tests.world import run_world

pytestmark = [pytest.mark.virtual_device, pytest.mark.timeout(120)]

COMMHOOKS = str(Path(commhooks.__file__).parent)
STEPS = 6
ELEMENTS = 47


def modules(rank: int, gather: str | None = None) -> Iterator[None]:
    """Yield after each step of a model whose modules' gradients are compressed."""
    model = training.sharded_model()
    attachment = commhooks.attach_sharded(model, "all-reduce", gather=gather)
    for _ in training.steps_of(model, rank, STEPS):
        if gather is not None:  # an evaluation
            with torch.no_grad():
                model(torch.ones(2, 20, device="cuda"))
        yield
    torch.cuda.synchronize()  # see `training.train_sharded`
    attachment.close()


def gathers(rank: int) -> Iterator[None]:
    """Yield after each step of such a model whose weights are compressed, too."""
    yield from modules(rank, gather="int8:block=32")


def replicas(rank: int) -> Iterator[None]:
    """Yield after each step of replicas, module by module."""
    model, attachment = training.replicated("fifo")
    yield from training.steps_of(model, rank, STEPS)
    torch.cuda.synchronize()
    attachment.close()


def exchangers(rank: int) -> Iterator[None]:
    """Yield after each round of several exchangers."""
    made = on_one_connection(4)
    for step in range(STEPS):
        for exchanger in made:
            average(exchanger, rank, step)
        yield


def on_one_connection(count: int, policy: Any = "fused") -> list[Exchanger]:
    connection = ProcessGroupConnection(dist.distributed_c10d._get_default_group())
    return [one_more(connection, f"part {number}", policy) for number in range(count)]


def one_more(connection: ProcessGroupConnection, name: str, policy: Any = "fused") -> Exchanger:
    return Exchanger(values(0), "all-reduce", connection=connection, name=name, policy=policy)


def values(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((ELEMENTS - 7,), float(value), device="cuda"), "b": torch.zeros(7, device="cuda")}


def average(exchanger: Exchanger, rank: int, step: int) -> dict[str, Tensor]:
    """Return a mean, which is `step` + 0.5; nobody waits for it."""
    exchanger.average(found := values(step + rank))
    return found


@contextlib.contextmanager
def waits_of_the_host() -> Iterator[Callable[[], int]]:
    """Yield a function that returns how often the host has waited for the device, in commhooks, since its last call."""
    polled = 0
    read = Turns.read

    def counted(turns: Turns, leaving: int = 0, look_around: Any = None) -> None:
        nonlocal polled
        with mock.patch.object(turns, "_look_around", wraps=turns._look_around) as looks:
            read(turns, leaving, look_around)
        polled += bool(looks.call_count)

    def since() -> int:
        nonlocal polled
        waits: int = polled + sum(place.startswith(COMMHOOKS) for _, place in extension().host_waits())
        extension().forget_host_waits()
        polled = 0
        return waits

    with mock.patch.object(Turns, "read", counted):
        yield since


def test_the_host_waits_once_a_step_for_all_channels() -> None:
    """If it read whose turn it is before each unit, it would wait for each of them, twice."""
    for of_rank in run_world(_waits, 2, backend="nccl", environment=ranks.environment("late")):
        for of_channels, waits in of_rank.items():
            assert waits[0] >= 3, of_channels  # a unit that is new is waited for
            assert max(waits[2:]) <= 1, of_channels
            assert sum(waits[2:]) >= 2, f"{of_channels}: the host never waits, however late the device is"


def _waits(rank: int) -> dict[str, list[int]]:
    """Return the waits of each step, by what has channels."""
    with waits_of_the_host() as since:
        return {
            of_channels.__name__: [since() for _ in of_channels(rank)]
            for of_channels in (modules, gathers, replicas, exchangers)
        }


def test_means_are_right_when_a_channel_opens_later_or_is_left_out() -> None:
    for waits in run_world(_changing, 2, backend="nccl", environment=ranks.environment("random:1")):
        assert max(waits[2:4] + waits[7:10] + waits[13:]) <= 1


def _changing(rank: int) -> list[int]:
    """Return the waits of each step; channel 3 opens in step 4, and channel 1 is left out in step 10."""
    made, means, waits = on_one_connection(3), list[tuple[int, Tensor]](), list[int]()
    with waits_of_the_host() as since:
        for step in range(16):
            if step == 4:
                made.append(one_more(made[0].engine.connection, "part 3"))  # type: ignore[arg-type]  # a Connection
            for number, exchanger in enumerate(made):
                if (step, number) != (10, 1):
                    means.append((step, average(exchanger, rank, step)["w"]))
            waits.append(since())
    for step, mean in means:
        assert torch.equal(mean.cpu(), torch.full((ELEMENTS - 7,), step + 0.5))
    for exchanger in made:
        exchanger.state_dict()
        exchanger.close()
    return waits


@pytest.mark.parametrize(
    ("policy", "then"), [("fifo", "begin"), ("fused", "state_dict"), ("fused", "close"), ("fused", "open")]
)
def test_another_order_is_an_error_on_every_rank_and_no_wrong_mean_is_used(policy: str, then: str) -> None:
    """The rank that departs issues nothing; the other one's collective meets another of the same size."""
    told = run_world(_departing, 2, policy, then, backend="nccl", environment=ranks.environment("late"))
    for text in told:
        assert "ranks hand in different things" in text
        assert "rank 0: round 3, part 0, bucket 0; rank 1: round 3, part 1, bucket 0." in text


def _departing(rank: int, policy: str, then: str) -> str:
    made = on_one_connection(3, policy)
    for step in range(3):
        for exchanger in made:
            average(exchanger, rank, step)
    if rank == 1:
        with pytest.raises(CollectiveError) as caught:
            average(made[1], rank, 3)
        dist.all_reduce(torch.ones(ELEMENTS, device="cuda"))  # the user's own
        return str(caught.value)
    means = average(made[0], rank, 3)
    if then == "close":
        for exchanger in made[1:]:
            exchanger.close()
        with pytest.warns(UserWarning, match="different things") as warned:
            made[0].close()
        text = str(warned[0].message)
    elif then == "open":
        with pytest.raises(CollectiveError) as stopped:
            one_more(made[0].engine.connection, "part 3").open()  # type: ignore[arg-type]  # a Connection
        text = str(stopped.value)
    elif then == "state_dict":
        with pytest.raises(CheckpointError) as refused:
            made[1].state_dict()
        text = str(refused.value)
        with pytest.raises(CollectiveError, match="different things"):
            made[2].replace("fp16")  # its comparison would meet what the other rank does next
    assert all(bool(mean.isnan().any()) for mean in means.values())
    if then == "begin":
        with pytest.raises(CollectiveError) as caught:
            average(made[1], rank, 3)
        text = str(caught.value)
    return text
