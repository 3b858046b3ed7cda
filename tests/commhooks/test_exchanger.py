"""Named tensors, averaged without any DDP."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commhooks
from commhooks import Exchanger, SettingsError
from commhooks.compressors import PowerSGD
from commhooks.errors import CompressorError
from commhooks.language.bucket import BucketView
from commhooks.language.compressor import Compressor, Context, Exchange
from commhooks.language.requests import AllGather, Part
from commhooks.lockstep import average_in_lockstep, lockstep_connections
from commhooks.scheduling.connection import ProcessGroupConnection
from commhooks.scheduling.lockstep import run_in_turns
from tests import bounds
from tests.commhooks.resuming import distance
from tests.commhooks.told import told_by
from tests.commhooks.workers import exchangers
from tests.ddp_core.facts import Facts

facts = Facts()

TENSORS = {
    "a": torch.zeros(24, 40),
    "b": torch.zeros(5, dtype=torch.float64),
    "c": torch.zeros(3, 4).t(),
    "d": torch.zeros(()),
}


def drawn(rank: int, step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(t.shape, generator=generator).to(t.dtype) for name, t in TENSORS.items()}


def means(world_size: int, step: int = 0) -> dict[str, Tensor]:
    return {
        name: torch.stack([drawn(rank, step)[name].double() for rank in range(world_size)]).mean(0) for name in TENSORS
    }


@pytest.mark.parametrize("policy", ["fifo", "fused"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_workers_of_one_process_get_the_mean(policy: Any, world_size: int) -> None:
    workers = exchangers(TENSORS, "all-reduce", world_size, policy)
    for step in range(3):
        values = [drawn(rank, step) for rank in range(world_size)]
        average_in_lockstep(workers, values)
        for own in values:
            for name, mean in means(world_size, step).items():
                allowed = bounds.of_mean(world_size, TENSORS[name].dtype) * 5  # no element is above 5
                assert (own[name].double() - mean).abs().amax() <= allowed
    assert workers[0].steps == 3
    assert workers[0].statistics().gradient_elements == 3 * sum(t.numel() for t in TENSORS.values())
    assert set(workers[0].by_parameter()) == set(TENSORS)


def test_zeros_are_values_like_others() -> None:
    """A DDP hands in zeros for a rank that has run out of inputs; an Exchanger does not."""
    workers = exchangers({"w": torch.zeros(64)}, "top-k")
    average_in_lockstep(workers, [{"w": torch.arange(64.0)} for _ in range(2)])
    silence = [{"w": torch.zeros(64)} for _ in range(2)]
    average_in_lockstep(workers, silence)
    assert silence[0]["w"].any(), "what was not sent in the first step is sent in the second"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tensors": {}}, "must name at least one"),
        ({"tensors": {"w": torch.zeros(3, dtype=torch.int64)}}, "'w' must be dense and of floating point"),
        ({"compressor": 7}, "expected a Compressor or a name"),
        ({"compressor": PowerSGD(skip=("head",))}, "'head' must match"),
        ({"weighted": 2.5}, r"Exchanger\(weighted=2.5\): weighted must be True or False"),
        ({"atomic": "no"}, r"Exchanger\(atomic='no'\): atomic must be True or False"),
        ({"policy": []}, r"Exchanger\(policy=\[\]\): policy must be one of fifo, fused"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_with_the_value_when_it_is_built(settings: dict[str, Any], complaint: str) -> None:
    connection = {} if "policy" in settings else {"connection": lockstep_connections(1)[0]}
    with pytest.raises(SettingsError, match=complaint):
        Exchanger(**{"tensors": TENSORS, "compressor": "all-reduce"} | connection | settings)


def test_other_tensors_are_refused_by_name_and_nothing_is_lost() -> None:
    exchanger = Exchanger(TENSORS, "all-reduce", connection=lockstep_connections(1)[0])
    sparse = TENSORS["b"].to_sparse()
    for wrong in (
        {"a": torch.zeros(24, 40)},
        *(drawn(0) | {"b": b} for b in (torch.zeros(5), sparse)),
        drawn(0) | {"z": sparse},
    ):
        with pytest.raises(CompressorError, match="rank 0: Exchanger was made for other tensors: '[bz]'"):
            exchanger.average(wrong)
    assert exchanger.steps == 0
    exchanger.average(drawn(0))


def test_a_round_of_workers_that_take_turns_is_not_waited_for_and_none_begins_after_the_end() -> None:
    """One worker waiting would keep the others from their turns."""
    workers = exchangers(TENSORS, "all-reduce", policy="fifo")
    begun = workers[0].begin(drawn(0))
    with pytest.raises(CompressorError, match=r"Averaging.wait: the last round is under way; let the workers"):
        begun.write(drawn(0))
    workers[1].begin(drawn(1))
    run_in_turns([worker.engine.connection for worker in workers])  # type: ignore[misc]  # LockstepConnections
    begun.write(values := drawn(0))
    assert torch.allclose(values["a"].double(), means(2)["a"])
    workers[0].close()
    with pytest.raises(commhooks.AttachError, match="average_in_lockstep: this Exchanger was closed"):
        average_in_lockstep(workers, [drawn(0), drawn(1)])
    with pytest.raises(commhooks.AttachError, match="begin: this Exchanger was closed"):
        workers[0].begin(drawn(0))


@facts
def ranks_that_name_other_tensors_disagree(rank: int) -> None:
    exchanger = Exchanger({f"w{rank}": torch.zeros(3)}, "all-reduce")
    told = told_by(lambda: exchanger.average({f"w{rank}": torch.zeros(3)}))
    assert "ranks disagree" in told.text and "tensor w1: missing (rank 0), shape (3,)" in told.text


@facts
def rounds_begun_before_the_first_is_written_have_their_own_means(rank: int) -> None:
    """And leave the state of three that are awaited."""
    awaited, overlapping = (Exchanger(TENSORS, "top-k") for _ in range(2))
    expected = []
    for step in range(3):
        expected.append(drawn(rank, step))
        awaited.average(expected[-1])
    rounds = [overlapping.begin(drawn(rank, step)) for step in range(3)]
    got = [drawn(rank, step) for step in range(3)]
    for averaging, into in zip(reversed(rounds), reversed(got), strict=True):
        averaging.write(into)
    assert all(averaging.done() for averaging in rounds)
    assert distance(got, expected) == 0
    assert distance(awaited.state_dict()["local"], overlapping.state_dict()["local"]) == 0
    with pytest.raises(CompressorError, match="were written before"):
        rounds[0].write(got[0])
    awaited.close()
    overlapping.close()


@facts
def memory_does_not_grow_while_rounds_overlap(rank: int) -> None:
    for name in ("top-k", "powersgd", "int4"):
        exchanger = Exchanger(TENSORS, name)
        working = []
        for step in range(12):
            rounds = [exchanger.begin(drawn(rank, 2 * step + one)) for one in range(2)]
            for averaging in rounds:
                averaging.wait()
            working.append(exchanger.memory().working)
        assert max(working) <= max(working[:4]), name
        exchanger.close()


def test_rounds_that_no_longer_overlap_use_one_memory() -> None:
    (connection,) = lockstep_connections(1)
    exchanger = Exchanger(TENSORS, "top-k", connection=connection)
    overlapping = []
    for step in range(2):
        overlapping.append(exchanger.begin(drawn(0, step)))
        run_in_turns([connection])
    for averaging in overlapping:
        averaging.write(drawn(0))
    places = set()
    for _ in range(4):
        places.add(exchanger.buffers["a"].data_ptr())
        averaging = exchanger.begin()
        run_in_turns([connection])
        averaging.write(drawn(0))
    assert len(places) == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfAnotherSize(Compressor):
    """Gather another number of elements in every round."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        yield AllGather(Part(bucket.memory[: context.step + 1]), last=True)


def test_memory_does_not_grow_while_every_round_sends_another_size() -> None:
    tensors = {"a": torch.zeros(1000)}
    workers = exchangers(tensors, OfAnotherSize())
    for _ in range(60):
        average_in_lockstep(workers, [{"a": torch.ones(1000)} for _ in workers])
    assert workers[0].memory().working <= 4 * 60 * tensors["a"].element_size()


@facts
def means_are_not_written_before_they_are_there_and_every_later_call_tells_the_cause(rank: int) -> None:
    """Rank 1 passes other tensors, which closes its exchanger: alone on a connection, and beside another one."""
    shared = ProcessGroupConnection(dist.distributed_c10d._get_default_group(), hook_timeout=20.0)
    beside = Exchanger(TENSORS, "all-reduce", connection=shared)
    beside.average(drawn(rank))
    for connection in (None, shared):
        exchanger = Exchanger(TENSORS, "all-reduce", connection=connection)
        exchanger.average(drawn(rank))
        first = told_by(lambda: exchanger.average({"a": torch.zeros(2)} if rank else drawn(rank)))  # noqa: B023 called now
        second = told_by(lambda: exchanger.average(drawn(rank))).text  # noqa: B023 called now
        assert "rank 1: Exchanger was made for other tensors: 'a' is" in first.text and first.seconds < 20.0
        if rank:
            assert second.startswith("begin: this Exchanger was closed. rank 1: Exchanger was made for other tensors")
        else:
            assert all("rank 0" in text and "has not ended" not in text for text in (first.text, second)), (
                first,
                second,
            )


def test_an_expanded_tensor_is_refused_by_name_before_anything_is_sent() -> None:
    exchanger = Exchanger({"w": torch.zeros(3, 4)}, "all-reduce", connection=lockstep_connections(1)[0])
    with pytest.raises(CompressorError, match="elements of 'w' share memory"):
        exchanger.average({"w": torch.ones(1, 4).expand(3, 4)})
    assert exchanger.steps == 0
    averaging = exchanger.begin({"w": torch.ones(1, 4).expand(3, 4)})  # it may be read
    run_in_turns([exchanger.engine.connection])  # type: ignore[list-item]  # a LockstepConnection
    with pytest.raises(CompressorError, match=r"elements of 'w' share memory.*nothing was written"):
        averaging.write({"w": torch.zeros(1, 4).expand(3, 4)})
    into = {"w": torch.zeros(3, 4)}
    averaging.write(into)
    assert bool((into["w"] == 1).all())


@facts
def tensors_in_another_order_of_memory_are_refused(rank: int) -> None:
    of_four, of_two = torch.arange(24.0).view(2, 3, 2, 2), torch.arange(24.0).view(4, 6)
    if rank:
        of_four, of_two = of_four.contiguous(memory_format=torch.channels_last), of_two.t().contiguous().t()
    for tensor in (of_four, of_two):
        exchanger = Exchanger({"w": tensor}, "top-k")
        told = told_by(functools.partial(exchanger.average, {"w": tensor}))
        assert "ranks disagree" in told.text and "tensor w: " in told.text and "strides" in told.text


test = facts.tests()
