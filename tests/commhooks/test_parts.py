"""The parts of the engine by themselves: requests, communicators, wrappers, the order of collectives, state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.communicators import Collective, ProcessGroupCommunicator
from commhooks.communicators.lockstep import run_collective
from commhooks.compressors import AllReduceMean
from commhooks.language import (
    AllGather,
    AllReduce,
    AllToAll,
    BucketView,
    Compressor,
    Context,
    Entry,
    Exchange,
    Group,
    Layout,
    Part,
    ReduceScatter,
    Request,
    Slot,
)
from commhooks.saving.resumption import lay_out
from commhooks.scheduling.packing import Packer
from commhooks.scheduling.policy import Fifo, Fused
from commhooks.scheduling.task import BucketTask
from commhooks.state.table import StateTable
from tests.commhooks.workers import Workers, normal, zeros
from tests.world import run_world

# --- requests -------------------------------------------------------------------------------------------------------


def carried_out(requests: Sequence[Request], *, by_name: bool = False) -> list[list[Tensor]]:
    """Return every rank's answers to what it asked for; one request for each rank."""
    world_size = len(requests)
    answers = [[part.tensor for part in request.parts] for request in requests]
    of_ranks = [Packer(world_size, by_name=by_name).pack([request]) for request in requests]
    for collectives in zip(*of_ranks, strict=True):
        results = run_collective([packed.collective for packed in collectives])
        for own, packed, result in zip(answers, collectives, results, strict=True):
            for place, answer in zip(packed.places, packed.answers(result), strict=True):
                own[place.number] = answer
    return answers


@pytest.mark.parametrize(
    ("request_", "payload", "moved_by_four"),
    [
        (AllReduce(Part(torch.zeros(100))), 400, 600),
        (AllReduce(Part(torch.zeros(100), wire=torch.float16)), 200, 300),
        (AllReduce(Part(torch.zeros(100, dtype=torch.complex64))), 800, 1200),
        (AllReduce(Part(torch.zeros(100, dtype=torch.complex64), wire=torch.float16)), 400, 600),
        (AllReduce(Part(torch.zeros(10, 8).to_sparse())), 0, 0),
        (AllReduce(Part(torch.eye(4).to_sparse())), 4 * 2 * 8 + 4 * 4, 240),
        (AllReduce(Part(torch.zeros(60)), Part(torch.zeros(4, 10))), 400, 600),
        (AllGather(Part(torch.zeros(25, dtype=torch.int8))), 25, 75),
        (AllGather(Part(torch.zeros(3)), Part(torch.zeros(5, dtype=torch.uint8))), 20, 60),  # rows begin at fours
        (AllToAll(Part(torch.zeros(4, 5, dtype=torch.float64))), 160, 120),
        (ReduceScatter(Part(torch.zeros(4, 5))), 80, 60),
    ],
    ids=lambda value: type(value).__name__,
)
def test_collectives_know_their_bytes(request_: Request, payload: int, moved_by_four: int) -> None:
    (packed,) = Packer(4, by_name=False).pack([request_])
    assert packed.collective.payload_bytes == payload
    assert packed.collective.ring_bytes(4) == moved_by_four
    assert packed.collective.ring_bytes(1) == 0


@pytest.mark.parametrize("mean", [3e-8, 5e4])
def test_a_mean_that_fits_the_wire_survives_it(mean: float) -> None:
    """PyTorch's fp16 hook casts before it divides: the first of these becomes 0 there, the second inf."""
    ranks = [torch.tensor([4 * mean]), *torch.zeros(3, 1)]
    answers = carried_out([AllReduce(Part(tensor, wire=torch.float16), average=True) for tensor in ranks])
    assert all(answer.item() == torch.tensor(mean).half().item() for (answer,) in answers)
    assert torch.tensor(4 * mean).half().div_(4).item() in (0.0, float("inf"))


@pytest.mark.parametrize("by_name", [False, True])
def test_what_is_not_to_be_written_into_is_only_read(by_name: bool) -> None:
    """And what is, is the answer itself."""
    own = [torch.full((3,), float(rank)) for rank in range(2)]
    layout = Layout(("a",), (3,))
    for parts in (1, 2):
        kept = [[own[rank].clone() for _ in range(parts)] for rank in range(2)]
        answers = carried_out([AllReduce(*(Part(p, layout) for p in of_rank)) for of_rank in kept], by_name=by_name)
        assert all(torch.equal(p, own[rank]) for rank, of_rank in enumerate(kept) for p in of_rank)
        assert all(answer.tolist() == [1.0, 1.0, 1.0] for of_rank in answers for answer in of_rank)
        requests = [AllReduce(*(Part(p, layout, in_place=True) for p in of_rank)) for of_rank in kept]
        for of_rank, answered in zip(kept, carried_out(requests, by_name=by_name), strict=True):
            assert all(answer is p and p.tolist() == [1.0] * 3 for p, answer in zip(of_rank, answered, strict=True))


# --- communicators --------------------------------------------------------------------------------------------------


def test_lockstep_and_gloo_answer_alike() -> None:
    """Also in the forms that NCCL is asked in, which Gloo has too."""
    gathered = run_world(_ask_everything, 3)
    for name in _requests(0, 3):
        every_rank = carried_out([_requests(rank, 3)[name] for rank in range(3)])
        for both_forms, expected in zip(gathered, every_rank, strict=True):
            for answers in both_forms:
                assert answers[name] == [_plain(answer) for answer in expected], name


def _requests(rank: int, world_size: int) -> dict[str, Request]:
    base = torch.arange(6, dtype=torch.float32).view(3, 2) + 10 * rank
    return {
        "sum": AllReduce(Part(base.clone())),
        "mean": AllReduce(Part(base.clone()), average=True),
        "mean in bf16": AllReduce(Part(base.clone(), wire=torch.bfloat16), average=True),
        "means of two": AllReduce(Part(base.clone()), Part(base.double()), average=True),
        "complex": AllReduce(Part(torch.complex(base, -base)), average=True),
        "gather": AllGather(Part(base.clone())),
        "gather bytes": AllGather(Part(base.to(torch.uint8))),
        "gather float8 and int32": AllGather(Part(base.to(torch.float8_e5m2)), Part(base.to(torch.int32))),
        "swap": AllToAll(Part(base.clone())),
        "swap two": AllToAll(Part(base.clone()), Part(base.to(torch.uint8))),
        "scatter": ReduceScatter(Part(base.clone())),
        "sparse": AllReduce(Part(torch.eye(4)[[rank]].to_sparse()), average=True),
    }


def _plain(tensor: Tensor) -> Any:
    dense = tensor.to_dense()
    return (dense if dense.is_complex() else dense.double()).tolist()


def _ask_everything(rank: int) -> list[dict[str, Any]]:
    return [_ask(rank, ProcessGroupCommunicator(has_tensor_forms=given)) for given in (False, True)]


def _ask(rank: int, communicator: ProcessGroupCommunicator) -> dict[str, Any]:
    answers = {}
    for name, request in _requests(rank, communicator.world_size).items():
        own = list(request.parts)
        answers[name] = [None for _ in own]
        for packed in Packer(communicator.world_size, by_name=False).pack([request]):
            pending = communicator.start(packed.collective)
            pending.wait(10.0)
            pending.wait()
            for place, answer in zip(packed.places, packed.answers(pending.result), strict=True):
                answers[name][place.number] = _plain(answer)
    return answers


# --- the order of collectives ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds(Compressor):
    """Ask for so many sums; of the bucket's own memory if `in_place`."""

    rounds: int
    says_last: bool = True
    in_place: bool = False

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        for number in range(self.rounds):
            last = self.says_last and number == self.rounds - 1
            yield AllReduce(Part(bucket.memory, bucket.layout, in_place=self.in_place), last=last)


class Scripted:
    """A communicator that notes what is started, whose collectives end when the test says so."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.log: list[str] = []
        self.sizes: list[int] = []
        self.places: list[int] = []

    def start(self, collective: Collective) -> ScriptedPending:
        self.sizes.append(collective.payload_elements)
        self.places.append(collective.tensor.data_ptr())
        self.log.append(f"start {int(collective.tensor[0])}")
        return ScriptedPending(collective.tensor, len(self.log) - 1)


class ScriptedPending:
    def __init__(self, tensor: Tensor, number: int) -> None:
        self.result = tensor
        self.number = number

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Be done at once."""


def _task(bucket: int, compressor: Compressor, *, is_last: bool = False) -> BucketTask:
    view = BucketView(bucket, torch.full((2,), float(bucket)))
    return BucketTask(
        exchange=compressor.compress(view, Context(0, 1, 0)),
        bucket=view,
        futures=[torch.futures.Future()],
        step=0,
        is_last=is_last,
        parameters=lambda: "p",
        world_size=1,
    )


@pytest.mark.parametrize("policy", [Fifo, Fused])
@pytest.mark.parametrize("says_last", [True, False])
@pytest.mark.parametrize("arrivals", [[0, 0, 0], [0, 1, 2], [0, 3, 3], [0, 9, 20]], ids=str)
def test_the_order_of_collectives_does_not_depend_on_when_buckets_come(
    arrivals: list[int], says_last: bool, policy: type[Fifo | Fused]
) -> None:
    """Bucket n has 1 + n rounds: fifo has one bucket's after another's, fused one collective for each round of all."""
    communicator = Scripted()
    finished: list[int] = []
    waits = iter(range(10**6))
    order = policy(communicator, lambda pending: next(waits) % 3 == 0, lambda task: finished.append(task.bucket.index))
    for step in range(2):
        for turn in range(60):
            for bucket, arrival in enumerate(arrivals):
                if arrival == turn:
                    order.add(_task(bucket, Rounds(rounds=1 + bucket, says_last=says_last), is_last=bucket == 2))
            order.turn()
            if policy is Fused and turn < arrivals[-1]:
                assert len(communicator.log) == 3 * step  # nothing is issued before the last bucket has come
        assert finished == [0, 1, 2] * (step + 1) and order.unfinished() == []
    if policy is Fifo:
        assert communicator.log == [f"start {bucket}" for bucket in (0, 1, 1, 2, 2, 2)] * 2
    else:
        assert communicator.sizes == [6, 4, 2] * 2


@pytest.mark.parametrize("policy", [Fifo, Fused])
def test_a_bucket_that_travels_whole_is_not_copied(policy: type[Fifo | Fused]) -> None:
    communicator = Scripted()
    order = policy(communicator, lambda pending: True, lambda task: None)
    tasks = [_task(bucket, Rounds(rounds=1, in_place=True), is_last=bucket == 2) for bucket in range(3)]
    for task in tasks:
        order.add(task)
    while order.turn():
        pass
    assert communicator.places == [task.bucket.memory.data_ptr() for task in tasks]
    assert order.working_memory() == []


def test_only_what_is_of_one_kind_dtype_and_purpose_travels_together() -> None:
    tensor = torch.zeros(4)
    kinds = (
        AllReduce(Part(tensor)),
        AllReduce(Part(tensor), average=True),
        AllReduce(Part(tensor), average=True, group=Group("inner", 2)),
        AllReduce(Part(tensor, wire=torch.float16), average=True),
        AllReduce(Part(tensor.double()), average=True),
        AllReduce(Part(tensor.to_sparse()), average=True),
        AllReduce(Part(torch.complex(tensor, tensor)), average=True),
        AllReduce(Part(tensor, in_place=True), average=True),
        AllGather(Part(tensor)),
        AllGather(Part(tensor), group=Group("inner", 2)),
        AllToAll(Part(tensor)),
        ReduceScatter(Part(tensor)),
        ReduceScatter(Part(tensor.double())),
    )
    made = Packer(4, by_name=True).pack([*kinds, *kinds])
    # What is sparse, complex, or needs no other memory than its own travels alone.
    assert sorted(len(packed.places) for packed in made) == [1] * 6 + [2] * 10
    sizes = [16, 16, 16, 8, 32, 0, 32, 16, 16, 16, 16, 16, 32]
    assert sum(packed.collective.payload_bytes for packed in made) == 2 * sum(sizes)


def test_a_message_is_nobody_elses_until_its_task_has_ended() -> None:
    """Buckets of equal sizes, of one model or two, whose last requests are under way at the same time."""
    packer, part = Packer(2, by_name=False), Part(torch.arange(6.0))
    requests = [AllGather(part)], [AllReduce(Part(part.tensor, part.layout), Part(part.tensor, part.layout))]
    for request in requests:
        (one,), (other,) = packer.pack(request), packer.pack(request)
        places = {packed.collective.tensor.data_ptr() for packed in (one, other)}
        assert len(places) == 2
        assert one.message and other.message
        one.message.give_back()
        (again,) = packer.pack(request)
        assert again.collective.tensor.data_ptr() in places - {other.collective.tensor.data_ptr()}
        assert again.message is one.message
        again.message.give_back()
        other.message.give_back()


@pytest.mark.parametrize("raises", [False, True])
def test_a_task_gives_its_messages_back_when_it_ends(raises: bool) -> None:
    order = Fifo(Scripted(), lambda pending: True, lambda task: task.fail(KeyError()) if raises else task.succeed())
    used, first = set(), _task(0, Rounds(rounds=1))
    for _ in range(3):
        exchange = Rounds(rounds=1).compress(first.bucket, Context(0, 1, 0))
        order.add(dataclasses.replace(first, exchange=exchange, futures=[torch.futures.Future()]))
        while order.turn():
            pass
        used.add(tuple(memory.data_ptr() for memory in order.working_memory()))
    assert len(used) == 1 and len(used.pop()) == 1


def test_a_collective_that_fails_is_thrown_into_the_compressor() -> None:
    seen: list[BaseException] = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Watching(Compressor):
        def compress(self, bucket: BucketView, context: Context) -> Exchange:
            try:
                yield AllReduce(Part(bucket.memory))
            except commhooks.CollectiveError as error:
                seen.append(error)
                raise

    wrappers: list[Compressor] = [
        Watching(),
        commhooks.WireDtype(inner=Watching(), dtype=torch.float16),
        commhooks.ErrorFeedback(inner=Watching()),
        commhooks.StartAfter(inner=AllReduceMean(), before=Watching(), steps=1),
    ]
    for compressor in wrappers:
        task = _task(0, compressor)
        task.begin()
        task.throw(commhooks.CollectiveError("the connection is cut"))
    assert [str(error) for error in seen] == ["the connection is cut"] * 4


# --- wrappers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("matrices", ["first-dimension", "whole-bucket"])
@pytest.mark.parametrize("policy", ["fifo", "fused"])
def test_what_comes_first_has_its_own_state_and_hands_over_the_residual(matrices: str, policy: str) -> None:
    """Bases of rank 3 are not those of rank 1, by whatever name. All state is laid out before the first step."""
    wide, narrow = (commhooks.make_compressor("powersgd", rank=rank, matrices=matrices) for rank in (3, 1))
    parameters = zeros((30, 40), (30, 40), (7,))
    started = Workers(commhooks.StartAfter(before=wide, inner=narrow, steps=3), 2, parameters, policy=policy)
    first = Workers(wide, 2, parameters, policy=policy)
    for engine in started.engines:
        lay_out(engine, set())
    for step in range(3):
        gradients = normal(parameters, 2, seed=step)
        for ours, theirs in zip(started.step(gradients)[0], first.step(gradients)[0], strict=True):
            assert torch.equal(ours, theirs)
    for own, same in zip(started.states, first.states, strict=True):
        assert all(torch.equal(a[-1], b[-1]) for a, b in zip(own.residuals(), same.residuals(), strict=True))
    then = Workers(narrow, 2, parameters, policy=policy)
    for table, of_first in zip(then.states, first.states, strict=True):
        owed = {name: {"residual": kept["residual"]} for name, kept in of_first.export()[1].items()}
        table.load({}, owed, of_first.kinds())
    then.step_number = 3
    for step in range(3, 6):
        gradients = normal(parameters, 2, seed=step)
        for ours, theirs in zip(started.step(gradients)[0], then.step(gradients)[0], strict=True):
            assert torch.equal(ours, theirs)


def test_a_cast_that_saves_nothing_is_not_made() -> None:
    """fp16 for bf16 has as many bytes, and a mean of 2e5 would become inf."""
    workers = Workers(commhooks.make_compressor("fp16"), 2, zeros((3,), dtype=torch.bfloat16))
    large = [[torch.full((3,), 2e5, dtype=torch.bfloat16)] for _ in range(2)]
    assert torch.equal(workers.step(large)[0][0], large[0][0])


@pytest.mark.parametrize("name", ["all-reduce", "noop"])
def test_error_feedback_keeps_nothing_where_nothing_is_lost(name: str) -> None:
    workers = Workers(commhooks.make_compressor(name, error_feedback=True), 2, zeros((30, 40), (7,)))
    workers.step(normal(workers.parameters, 2, seed=0))
    assert not any(one.memory_bytes() for one in workers.states[0].states())


def test_a_step_that_was_cut_short_is_dropped_when_the_next_one_begins() -> None:
    communicator, finished = Scripted(), []
    policy = Fused(communicator, lambda pending: True, lambda task: finished.append(task.step))
    stale, *whole = [_task(0, Rounds(rounds=1)), _task(0, Rounds(rounds=1)), _task(1, Rounds(rounds=1), is_last=True)]
    for task in whole:
        task.step = 1
    for task in (stale, *whole):
        policy.add(task)
    while policy.turn():
        pass
    assert finished == [1, 1] and communicator.sizes == [4]
    with pytest.raises(commhooks.CollectiveError, match="step 0 was cut short: step 1 began before its end"):
        stale.futures[0].wait()


# --- state and statistics -------------------------------------------------------------------------------------------


def test_memory_of_state_stays_where_it_is_and_what_is_loaded_is_copied_into_it() -> None:
    table, parameter = StateTable(), torch.zeros(4, 6).t()
    table.bind([("w", parameter)])
    entries = {
        "residual": Entry(kind="residual"),
        "v": Entry(kind="private", units=2),
        "Q": Entry(kind="replicated", shape=(2, 6), init=functools.partial(torch.full_like, fill_value=3.0)),
    }
    slot = Slot(parameter, parameter.reshape(-1), table.of(parameter))
    table.lay_out_entries(slot, entries)
    kept = table.of(parameter).tensors
    places = {name: tensor.data_ptr() for name, tensor in kept.items()}
    assert kept["residual"].tolist() == [0.0] * 24 and kept["Q"].tolist() == [[3.0] * 6] * 2
    kept["residual"].copy_(torch.arange(24))
    replicated, own = table.export()
    assert replicated.keys() == own.keys() == {"w"} and own["w"].keys() == {"residual", "v"}
    assert torch.equal(own["w"]["residual"], torch.arange(24.0).view(4, 6).t())  # in the parameter's own shape
    residual = own["w"]["residual"].contiguous().clone()
    kept["residual"].zero_()
    kept["v"].fill_(5.0)
    table.load({}, {"w": {"residual": residual}}, table.kinds())
    assert {name: tensor.data_ptr() for name, tensor in table.of(parameter).tensors.items()} == places
    assert kept["residual"].tolist() == list(range(24))
    assert kept["v"].tolist() == [0.0] * 24 and kept["Q"].tolist() == [[3.0] * 6] * 2  # not loaded: begun anew
    table.lay_out_entries(slot, entries)
    assert table.of(parameter)["residual"].data_ptr() == places["residual"]
