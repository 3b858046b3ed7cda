"""The parts of the engine by themselves: requests, communicators, wrappers, the order of collectives, state."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.communicators import Collective, LockstepGroup, ProcessGroupCommunicator
from commhooks.communicators.collective import CollectiveKind, Traffic
from commhooks.communicators.lockstep import run_collective
from commhooks.compressors import AllReduceMean, TwoHop
from commhooks.errors import CompressorError
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
from commhooks.scheduling.ledger import Ledger
from commhooks.scheduling.packing import Packer
from commhooks.scheduling.policy import Fifo, Fused
from commhooks.scheduling.task import BucketTask
from commhooks.state.table import StateTable
from tests.commhooks.models import wrap
from tests.commhooks.workers import Workers, normal, zeros
from tests.world import on_ranks, run_world

# --- requests -------------------------------------------------------------------------------------------------------


def carried_out(requests: Sequence[Request], *, by_name: bool = False) -> list[list[Tensor]]:
    """Return every rank's answers to what it asked for; one request for each rank."""
    world_size = len(requests)
    answers = [[part.tensor for part in request.parts] for request in requests]
    of_ranks = [Packer(world_size, by_name=by_name).ship([request]) for request in requests]
    for shipments in zip(*of_ranks, strict=True):
        results = run_collective([shipment.collective for shipment in shipments])
        for own, shipment, result in zip(answers, shipments, results, strict=True):
            for place, answer in zip(shipment.places, shipment.answers(result), strict=True):
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
    (shipment,) = Packer(4, by_name=False).ship([request_])
    assert shipment.collective.payload_bytes == payload
    assert shipment.collective.ring_bytes(4) == moved_by_four
    assert shipment.collective.ring_bytes(1) == 0


def test_a_ring_of_two_sends_a_sum_once_and_half_of_what_is_swapped() -> None:
    moved = {kind: Collective(kind, torch.zeros(2, 50)).ring_bytes(2) for kind in get_args(CollectiveKind)}
    assert moved == {"all-reduce": 400, "all-gather": 400, "all-to-all": 200, "reduce-scatter": 200}


@pytest.mark.parametrize("mean", [3e-8, 5e4])
def test_a_mean_that_fits_the_wire_survives_it(mean: float) -> None:
    """PyTorch's fp16 hook casts before it divides: the first of these becomes 0 there, the second inf."""
    ranks = [torch.tensor([4 * mean]), *torch.zeros(3, 1)]
    answers = carried_out([AllReduce(Part(tensor, wire=torch.float16), average=True) for tensor in ranks])
    assert all(answer.item() == torch.tensor(mean).half().item() for (answer,) in answers)
    assert torch.tensor(4 * mean).half().div_(4).item() in (0.0, float("inf"))


def test_the_elements_of_a_sparse_payload_are_those_of_its_values() -> None:
    rows = torch.ones(10, 16).to_sparse(1).index_select(0, torch.tensor([1, 4, 7]))
    assert Collective("all-reduce", rows).payload_elements == 48


def test_the_elements_of_a_message_of_bytes_are_those_that_were_put_in() -> None:
    (shipment,) = Packer(2, by_name=False).ship([AllGather(Part(torch.zeros(3)), Part(torch.zeros(5).to(torch.uint8)))])
    assert shipment.collective.tensor.dtype == torch.uint8 and shipment.collective.payload_elements == 8


def test_a_layout_must_describe_what_is_summed_in_place() -> None:
    layout = Layout(("a", "b"), (2, 3))
    assert layout.elements == 5
    Part(torch.zeros(5), layout, in_place=True)
    with pytest.raises(ValueError, match=r"Part: the layout must describe the tensor's 6 elements \(got 5\)"):
        Part(torch.zeros(6), layout, in_place=True)


@pytest.mark.parametrize("parts", [(), (torch.zeros(3),), (Part(torch.zeros(3)), None)], ids=str)
def test_a_request_is_made_of_parts(parts: Any) -> None:
    with pytest.raises(TypeError, match=r"AllReduce: expected one Part or more, such as slot.part\(tensor\)"):
        AllReduce(*parts)


def test_a_single_rank_gets_its_own_back() -> None:
    ((answer,),) = carried_out([AllReduce(Part(torch.tensor([1.0, 2.0])), average=True)])
    assert answer.tolist() == [1.0, 2.0]


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
        for shipment in Packer(communicator.world_size, by_name=False).ship([request]):
            pending = communicator.start(shipment.collective)
            pending.wait(10.0)
            pending.wait()
            for place, answer in zip(shipment.places, shipment.answers(pending.result), strict=True):
                answers[name][place.number] = _plain(answer)
    return answers


def test_lockstep_says_who_asked_for_something_else() -> None:
    with pytest.raises(
        commhooks.CollectiveError, match=r"rank 0 asked for all-reduce \(2,\).*rank 1 for all-reduce \(3,\)"
    ):
        run_collective([Collective("all-reduce", torch.zeros(2)), Collective("all-reduce", torch.zeros(3))])
    with pytest.raises(commhooks.CollectiveError, match="rank 0 asked for all-reduce.*rank 1 for all-gather"):
        run_collective([Collective("all-reduce", torch.zeros(2)), Collective("all-gather", torch.zeros(2))])


def test_lockstep_does_not_wait_for_workers_that_have_not_come() -> None:
    first, second = LockstepGroup(2).communicators()
    pending = first.start(Collective("all-reduce", torch.ones(1)))
    with pytest.raises(commhooks.CollectiveError, match="before every worker submitted its request"):
        pending.wait()
    second.start(Collective("all-reduce", torch.ones(1)))
    pending.wait()
    assert pending.result.item() == 2.0


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


@pytest.mark.parametrize("says_last", [True, False])
@pytest.mark.parametrize("arrivals", [[0, 0, 0], [0, 1, 2], [0, 3, 3], [0, 9, 20]], ids=str)
def test_the_order_of_collectives_does_not_depend_on_when_buckets_come(arrivals: list[int], says_last: bool) -> None:
    communicator = Scripted()
    finished: list[int] = []
    waits = iter(range(10**6))
    policy = Fifo(communicator, lambda pending: next(waits) % 3 == 0, lambda task: finished.append(task.bucket.index))
    for turn in range(60):
        for bucket, arrival in enumerate(arrivals):
            if arrival == turn:
                policy.add(_task(bucket, Rounds(rounds=2, says_last=says_last)))
        policy.turn()
    assert communicator.log == [f"start {bucket}" for bucket in (0, 0, 1, 1, 2, 2)]
    assert finished == [0, 1, 2] and policy.unfinished() == []


@pytest.mark.parametrize("says_last", [True, False])
@pytest.mark.parametrize("arrivals", [[0, 0, 0], [0, 1, 2], [0, 3, 3], [0, 9, 20]], ids=str)
def test_fused_makes_one_collective_of_a_round_whenever_buckets_come(arrivals: list[int], says_last: bool) -> None:
    communicator = Scripted()
    finished: list[int] = []
    waits = iter(range(10**6))
    policy = Fused(communicator, lambda pending: next(waits) % 3 == 0, lambda task: finished.append(task.bucket.index))
    for step in range(2):
        for turn in range(60):
            for bucket, arrival in enumerate(arrivals):
                if arrival == turn:
                    policy.add(_task(bucket, Rounds(rounds=1 + bucket, says_last=says_last), is_last=bucket == 2))
            policy.turn()
            if turn < arrivals[-1]:
                assert len(communicator.log) == 3 * step  # nothing is issued before the last bucket has come
        assert finished == [0, 1, 2] and policy.unfinished() == []
        finished.clear()
    assert communicator.sizes == [6, 4, 2] * 2  # the buckets that have a first round, a second, a third


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathers(Compressor):
    """Average by gathering everything, and once more by handing shares around."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        (gathered,) = yield AllGather(Part(bucket.memory.view(-1, 1)))
        shares = gathered[:, :, 0] * torch.arange(1.0, context.world_size + 1).view(-1, 1)  # to each rank its own
        (received,) = yield AllToAll(Part(shares.contiguous()), last=True)
        bucket.memory.copy_(received.sum(0))


def test_gathers_and_all_to_alls_of_many_buckets_travel_as_one() -> None:
    parameters = zeros((3, 5), (7,), (), (2, 2))
    one_by_one, together = (Workers(Gathers(), 3, parameters, buckets=4, policy=policy) for policy in ("fifo", "fused"))
    gradients = normal(parameters, 3, seed=0)
    for ours, theirs in zip(one_by_one.step(gradients), together.step(gradients), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert (one_by_one.traffic.collectives, together.traffic.collectives) == (8, 2)
    assert one_by_one.traffic.payload_bytes == together.traffic.payload_bytes


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
    made = Packer(4, by_name=True).ship([*kinds, *kinds])
    # What is sparse, complex, or needs no other memory than its own travels alone.
    assert sorted(len(shipment.places) for shipment in made) == [1] * 6 + [2] * 10
    sizes = [16, 16, 16, 8, 32, 0, 32, 16, 16, 16, 16, 16, 32]
    assert sum(shipment.collective.payload_bytes for shipment in made) == 2 * sum(sizes)


def test_a_message_is_nobody_elses_until_its_task_has_ended() -> None:
    """Buckets of equal sizes, of one model or two, whose last requests are under way at the same time."""
    packer, part = Packer(2, by_name=False), Part(torch.arange(6.0))
    requests = [AllGather(part)], [AllReduce(Part(part.tensor, part.layout), Part(part.tensor, part.layout))]
    for request in requests:
        (one,), (other,) = packer.ship(request), packer.ship(request)
        places = {shipment.collective.tensor.data_ptr() for shipment in (one, other)}
        assert len(places) == 2
        assert one.message and other.message
        one.message.give_back()
        (again,) = packer.ship(request)
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


def test_a_message_that_is_no_longer_used_is_let_go() -> None:
    compressor = commhooks.StartAfter(
        before=commhooks.make_compressor("fp16"), steps=1, inner=commhooks.make_compressor("powersgd")
    )
    workers = Workers(compressor, 1, zeros((30, 40), (30, 40)), buckets=2, policy="fused")
    kept = []
    for step in range(5):
        workers.step(normal(workers.parameters, 1, seed=step))
        kept.append(len(workers.engines[0].lane.working_memory()))
    assert kept == [1, 3, 3, 2, 2]  # the dense one, then P's and Q's too, then these alone


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


def test_start_after_runs_the_other_compressor_first() -> None:
    workers = Workers(commhooks.make_compressor("powersgd", rank=1, start_after=2), 2, zeros((30, 40)))
    payloads = []
    for step in range(4):
        before = workers.traffic.payload_bytes
        workers.step(normal(workers.parameters, 2, seed=step))
        payloads.append(workers.traffic.payload_bytes - before)
    assert payloads == [4800, 4800, 280, 280]


def test_without_error_feedback_no_server_keeps_an_error_either() -> None:
    sign = TwoHop(codec=commhooks.codecs.Sign())
    assert commhooks.make_compressor("sign") == commhooks.ErrorFeedback(inner=sign)
    bare = commhooks.WithoutFeedback(inner=dataclasses.replace(sign, server_feedback=False))
    assert commhooks.make_compressor("sign", error_feedback=False) == bare


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


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("feedback", [False, True])
def test_a_wire_is_not_put_round_what_casts_by_itself(name: str, feedback: bool) -> None:
    inner = commhooks.make_compressor(name, error_feedback=feedback)
    for wrapped in (inner, commhooks.StartAfter(inner=inner, steps=3)):
        with pytest.raises(
            commhooks.SettingsError, match=r"WireDtype\(inner=.*: inner must not choose its own wire dtype"
        ):
            commhooks.WireDtype(inner=wrapped, dtype=torch.float16)


def test_a_cast_that_saves_nothing_is_not_made() -> None:
    """fp16 for bf16 has as many bytes, and a mean of 2e5 would become inf."""
    workers = Workers(commhooks.make_compressor("fp16"), 2, zeros((3,), dtype=torch.bfloat16))
    large = [[torch.full((3,), 2e5, dtype=torch.bfloat16)] for _ in range(2)]
    assert torch.equal(workers.step(large)[0][0], large[0][0])


def test_a_state_that_was_built_says_that_its_settings_stay() -> None:
    state = commhooks.PowerSGDState(None)
    with pytest.raises(commhooks.SettingsError, match="matrix_approximation_rank cannot be changed to 4 any more"):
        state.matrix_approximation_rank = 4


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


def test_only_sums_can_be_cast_on_the_wire() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Gathering(Compressor):
        def compress(self, bucket: BucketView, context: Context) -> Exchange:
            yield AllGather(Part(bucket.memory))

    task = _task(0, commhooks.WireDtype(inner=Gathering(), dtype=torch.float16))
    with pytest.raises(CompressorError, match="only sums can be cast on the wire.*asked for an all-gather"):
        task.begin()


@pytest.mark.parametrize("name", ["all-reduce", "noop"])
def test_error_feedback_keeps_nothing_where_nothing_is_lost(name: str) -> None:
    workers = Workers(commhooks.make_compressor(name, error_feedback=True), 2, zeros((30, 40), (7,)))
    workers.step(normal(workers.parameters, 2, seed=0))
    assert not any(one.memory_bytes() for one in workers.states[0].states())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expanding(AllReduceMean):
    """Lose, at worst, so many times what is given, in squared norms."""

    error: float

    def loss(self, name: str, parameter: Tensor) -> commhooks.language.Loss | None:
        return commhooks.language.Loss(self.error) if parameter.numel() > 5 else None


@pytest.mark.parametrize("error", [1.0, 3.0, float("inf")])
def test_a_residual_that_would_grow_without_bound_is_refused_unless_it_fades(error: float) -> None:
    named = {"small": torch.zeros(5), "large": torch.zeros(6)}
    growing = commhooks.ErrorFeedback(inner=Expanding(error=error))
    started = commhooks.StartAfter(inner=commhooks.WireDtype(inner=growing, dtype=torch.float16), steps=3)
    complaint = rf"of parameter 'large', inner may lose {error:.3g} times.*grow without bound"
    for refused in (growing, started):
        with pytest.raises(commhooks.SettingsError, match=complaint):
            refused.check(named, 2)
        refused.check({"small": named["small"]}, 2)
    limit = 1 / math.sqrt(error)
    with pytest.raises(commhooks.SettingsError, match=complaint):
        dataclasses.replace(growing, decay=min(1.01 * limit, 1.0) or 0.1).check(named, 2)
    if limit:
        dataclasses.replace(growing, decay=0.99 * limit).check(named, 2)
    commhooks.ErrorFeedback(inner=Expanding(error=0.999)).check(named, 2)


@on_ranks(2, check_exit=False)
def test_what_is_attached_must_not_let_residuals_grow(rank: int) -> None:
    model = wrap("core", torch.nn.Linear(3, 2))
    growing = commhooks.ErrorFeedback(inner=Expanding(error=1.0))
    with pytest.raises(commhooks.SettingsError, match="of parameter 'weight', inner may lose 1 times"):
        commhooks.attach(model, growing)
    commhooks.attach(model, dataclasses.replace(growing, decay=0.5)).close()


# --- state and statistics -------------------------------------------------------------------------------------------


def test_state_is_found_by_the_parameter_itself_and_takes_its_name() -> None:
    table = StateTable()
    first, second = torch.zeros(2), torch.zeros(2)
    assert (table.of(first).key, table.of(second).key) == ("#0", "#1")
    assert table.of(first) is table.of(first) is not table.of(second)
    table.bind([("weight", first)])
    assert table.of(first).key == "weight" and table.name_of(second) is None


def _laid_out(table: StateTable, parameter: Tensor, **entries: Entry) -> dict[str, Tensor]:
    slot = Slot(parameter, parameter.reshape(-1), table.of(parameter))
    table.lay_out_entries(slot, entries)
    return table.of(parameter).tensors


def test_memory_of_state_stays_where_it_is_and_what_is_loaded_is_copied_into_it() -> None:
    table, parameter = StateTable(), torch.zeros(4, 6).t()
    table.bind([("w", parameter)])
    entries = {
        "residual": Entry(kind="residual"),
        "v": Entry(kind="private", units=2),
        "Q": Entry(kind="replicated", shape=(2, 6), init=functools.partial(torch.full_like, fill_value=3.0)),
    }
    kept = _laid_out(table, parameter, **entries)
    places = {name: tensor.data_ptr() for name, tensor in kept.items()}
    assert kept["residual"].tolist() == [0.0] * 24 and kept["Q"].tolist() == [[3.0] * 6] * 2
    kept["residual"].copy_(torch.arange(24))
    replicated, own = table.export()
    assert replicated.keys() == own.keys() == {"w"} and own["w"].keys() == {"residual", "v"}
    assert torch.equal(own["w"]["residual"], torch.arange(24.0).view(4, 6).t())  # in the parameter's own shape
    saved = {name: {e: t.contiguous().clone() for e, t in held["w"].items()} for name, held in (("own", own),)}["own"]
    kept["residual"].zero_()
    kept["v"].fill_(5.0)
    table.load({}, {"w": {"residual": saved["residual"]}}, table.kinds())
    assert {name: tensor.data_ptr() for name, tensor in table.of(parameter).tensors.items()} == places
    assert kept["residual"].tolist() == list(range(24))
    assert kept["v"].tolist() == [0.0] * 24 and kept["Q"].tolist() == [[3.0] * 6] * 2  # not loaded: begun anew
    assert _laid_out(table, parameter, **entries)["residual"].data_ptr() == places["residual"]


def test_what_is_loaded_waits_for_the_compressor_that_declares_it() -> None:
    table, parameter = StateTable(), torch.zeros(3)
    table.bind([("w", parameter)])
    kinds = {"w": {"residual": Entry(kind="residual"), "v": Entry(kind="private")}}
    table.load({}, {"w": {"residual": torch.ones(3), "v": torch.full((3,), 2.0)}}, kinds)
    assert table.kinds() == kinds
    assert _laid_out(table, parameter, residual=Entry(kind="residual"))["residual"].tolist() == [1.0] * 3
    assert _laid_out(table, parameter, v=Entry(kind="private"))["v"].tolist() == [2.0] * 3
    assert _laid_out(table, parameter, v=Entry(kind="private", shape=(5,)))["v"].tolist() == [0.0] * 5


def test_the_ledger_tells_the_last_step_from_all_of_them() -> None:
    ledger, traffic = Ledger(), Traffic()
    for step in range(3):
        for bucket in range(2):
            task = _task(bucket, Rounds(rounds=1))
            task.is_last = bucket == 1
            traffic.count(Collective("all-reduce", torch.zeros(10 * (step + 1))), world_size=2)
            ledger.enter(task, traffic)
    totals, last = ledger.totals(traffic), ledger.last_step()
    assert (totals.steps, totals.buckets, totals.collectives, totals.payload_bytes) == (3, 6, 6, 480)
    assert (last.steps, last.buckets, last.collectives, last.payload_bytes) == (1, 2, 2, 240)
    assert last.by_kind["all-reduce"].payload_bytes == 240 and totals.ratio == totals.gradient_bytes / 480
