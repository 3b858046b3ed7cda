"""The parts of the engine by themselves: requests, communicators, wrappers, the order of collectives, state."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks import (
    AllGather,
    AllReduce,
    AllToAll,
    BucketView,
    Compressor,
    Context,
    Layout,
    LockstepGroup,
    Request,
    Result,
)
from commhooks.communicators import ProcessGroupCommunicator
from commhooks.communicators.lockstep import answer_requests
from commhooks.compressors.powersgd.matrices import form_of
from commhooks.scheduling.fused import Fused, Packings, bundles
from commhooks.scheduling.ledger import Ledger, Traffic
from commhooks.scheduling.policy import Fifo
from commhooks.scheduling.task import BucketTask
from commhooks.state.table import StateTable
from tests.commhooks.ranks import run_ranks
from tests.commhooks.workers import Workers, normal, zeros

# --- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "payload", "moved_by_two", "moved_by_four"),
    [
        (AllReduce(torch.zeros(100)), 400, 400, 600),
        (AllReduce(torch.zeros(100), wire=torch.float16), 200, 200, 300),
        (AllReduce(torch.zeros(100, dtype=torch.complex64)), 800, 800, 1200),
        (AllReduce(torch.zeros(100, dtype=torch.complex64), wire=torch.float16), 400, 400, 600),
        (AllReduce(torch.zeros(10, 8).to_sparse()), 0, 0, 0),
        (AllReduce(torch.eye(4).to_sparse()), 4 * 2 * 8 + 4 * 4, 80, 240),
        (AllGather(torch.zeros(25, dtype=torch.int8)), 25, 25, 75),
        (AllToAll(torch.zeros(4, 5, dtype=torch.float64)), 160, 80, 120),
        (AllReduce(torch.zeros(0)), 0, 0, 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_requests_know_their_bytes(request_: Request, payload: int, moved_by_two: int, moved_by_four: int) -> None:
    assert request_.payload_bytes == payload
    assert [request_.ring_bytes(size) for size in (1, 2, 4)] == [0, moved_by_two, moved_by_four]


@pytest.mark.parametrize("mean", [3e-8, 5e4])
def test_a_mean_that_fits_the_wire_survives_it(mean: float) -> None:
    """PyTorch's fp16 hook casts before it divides: the first of these becomes 0 there, the second inf."""
    ranks = [torch.tensor([4 * mean]), *torch.zeros(3, 1)]
    answers = answer_requests([AllReduce(tensor, average=True, wire=torch.float16) for tensor in ranks])
    assert all(answer.item() == torch.tensor(mean).half().item() for answer in answers)
    assert torch.tensor(4 * mean).half().div_(4).item() in (0.0, float("inf"))


def test_the_elements_of_a_sparse_payload_are_those_of_its_values() -> None:
    rows = torch.ones(10, 16).to_sparse(1).index_select(0, torch.tensor([1, 4, 7]))
    assert AllReduce(rows).payload_elements == 48


def test_a_layout_must_describe_the_tensor() -> None:
    layout = Layout(("a", "b"), (2, 3))
    assert layout.elements == 5
    AllReduce(torch.zeros(5), layout=layout)
    with pytest.raises(ValueError, match=r"AllReduce: the layout must describe the tensor's 6 elements \(got 5\)"):
        AllReduce(torch.zeros(6), layout=layout)


def test_a_single_rank_gets_its_own_back() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert answer_requests([AllReduce(tensor, average=True)])[0].tolist() == [1.0, 2.0]


# --- communicators --------------------------------------------------------------------------------------------------


def test_lockstep_and_gloo_answer_alike() -> None:
    gathered = run_ranks(_ask_everything, 3)
    expected = [_answers_in_lockstep(rank, 3) for rank in range(3)]
    for ours, theirs in zip(gathered, expected, strict=True):
        for name, answer in theirs.items():
            assert ours[name] == answer, name


def _requests(rank: int, world_size: int) -> dict[str, Request]:
    base = torch.arange(6, dtype=torch.float32).view(3, 2) + 10 * rank
    return {
        "sum": AllReduce(base.clone()),
        "mean": AllReduce(base.clone(), average=True),
        "mean in bf16": AllReduce(base.clone(), average=True, wire=torch.bfloat16),
        "complex": AllReduce(torch.complex(base, -base), average=True),
        "gather": AllGather(base.clone()),
        "gather bytes": AllGather(base.to(torch.uint8)),
        "swap": AllToAll(base.clone()),
        "sparse": AllReduce(torch.eye(4)[[rank]].to_sparse(), average=True),
    }


def _plain(tensor: Tensor) -> Any:
    return tensor.to_dense().tolist()


def _ask_everything(rank: int) -> dict[str, Any]:
    communicator = ProcessGroupCommunicator()
    answers = {}
    for name, request in _requests(rank, communicator.world_size).items():
        pending = communicator.start(request)
        pending.wait(10.0)
        pending.wait()
        answers[name] = _plain(pending.result)
    return answers


def _answers_in_lockstep(rank: int, world_size: int) -> dict[str, Any]:
    every_rank = [_requests(other, world_size) for other in range(world_size)]
    return {name: _plain(answer_requests([r[name] for r in every_rank])[rank]) for name in every_rank[0]}


def test_lockstep_says_who_asked_for_something_else() -> None:
    with pytest.raises(
        commhooks.CollectiveError, match=r"rank 0 asked for all-reduce \(2,\).*rank 1 for all-reduce \(3,\)"
    ):
        answer_requests([AllReduce(torch.zeros(2)), AllReduce(torch.zeros(3))])
    with pytest.raises(commhooks.CollectiveError, match="rank 0 asked for all-reduce.*rank 1 for all-gather"):
        answer_requests([AllReduce(torch.zeros(2)), AllGather(torch.zeros(2))])


def test_lockstep_does_not_wait_for_workers_that_have_not_come() -> None:
    first, second = LockstepGroup(2).communicators()
    pending = first.start(AllReduce(torch.ones(1)))
    with pytest.raises(commhooks.CollectiveError, match="before every worker brought its request"):
        pending.wait()
    second.start(AllReduce(torch.ones(1)))
    pending.wait()
    assert pending.result.item() == 2.0


def test_run_lockstep_returns_what_each_worker_returns() -> None:
    def add_ranks(rank: int) -> Generator[Request, Tensor, float]:
        answer = yield AllReduce(torch.tensor([float(rank)]))
        return answer.item() + rank

    assert commhooks.run_lockstep([add_ranks(rank) for rank in range(4)]) == [6.0, 7.0, 8.0, 9.0]


def test_a_thousand_workers_fit_in_one_process() -> None:
    parameters = zeros((12, 20), (5,))
    workers = Workers(commhooks.PowerSGD(rank=1), 1000, parameters)
    means = workers.step([parameters] * 999 + [normal(parameters, 1, seed=0)[0]])
    assert all(torch.equal(means[0][0], mean[0]) for mean in means)


# --- the order of collectives ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds(Compressor):
    """Ask for so many sums."""

    rounds: int
    says_last: bool = True

    def compress(self, bucket: BucketView, context: Context) -> Generator[Request, Tensor, Result]:
        for number in range(self.rounds):
            last = self.says_last and number == self.rounds - 1
            yield AllReduce(bucket.memory, last=last)
        return Result(bucket.memory)


class Scripted:
    """A communicator that notes what is started, whose collectives end when the test says so."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.log: list[str] = []
        self.sizes: list[int] = []

    def start(self, request: Request) -> ScriptedPending:
        self.sizes.append(request.payload_elements)
        self.log.append(f"start {int(request.tensor[0])}")
        return ScriptedPending(request.tensor, len(self.log) - 1)


class ScriptedPending:
    def __init__(self, tensor: Tensor, number: int) -> None:
        self.result = tensor
        self.number = number

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Be done at once."""


def _task(bucket: int, compressor: Compressor, *, is_last: bool = False) -> BucketTask:
    memory = torch.full((2,), float(bucket))
    view = BucketView(bucket, memory)
    exchange = compressor.compress(view, Context(0, 1, 0))
    return BucketTask(exchange, torch.futures.Future(), memory, 0, bucket, is_last, lambda: "p", view.layout, 1)


@pytest.mark.parametrize("says_last", [True, False])
@pytest.mark.parametrize("arrivals", [[0, 0, 0], [0, 1, 2], [0, 3, 3], [0, 9, 20]], ids=str)
def test_the_order_of_collectives_does_not_depend_on_when_buckets_come(arrivals: list[int], says_last: bool) -> None:
    communicator = Scripted()
    finished: list[int] = []
    waits = iter(range(10**6))
    policy = Fifo(communicator, lambda pending: next(waits) % 3 == 0, lambda task: finished.append(task.index))
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
    policy = Fused(communicator, lambda pending: next(waits) % 3 == 0, lambda task: finished.append(task.index))
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathers(Compressor):
    """Average by gathering everything, and once more by handing shares round: what sign and top-k will need."""

    def compress(self, bucket: BucketView, context: Context) -> Generator[Request, Tensor, Result]:
        gathered = yield AllGather(bucket.memory.view(-1, 1))
        shares = gathered[:, :, 0] * torch.arange(1.0, context.world_size + 1).view(-1, 1)  # to each rank its own
        received = yield AllToAll(shares.contiguous(), last=True)
        bucket.memory.copy_(received.sum(0))
        return Result(bucket.memory)


def test_gathers_and_all_to_alls_of_many_buckets_travel_as_one() -> None:
    parameters = zeros((3, 5), (7,), (), (2, 2))
    one_by_one, together = (Workers(Gathers(), 3, parameters, buckets=4, policy=policy) for policy in ("fifo", "fused"))
    gradients = normal(parameters, 3, seed=0)
    for ours, theirs in zip(one_by_one.step(gradients), together.step(gradients), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert (one_by_one.traffic.collectives, together.traffic.collectives) == (8, 2)
    assert one_by_one.traffic.payload_bytes == together.traffic.payload_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asks(Compressor):
    """Ask for one request that the test made."""

    requests: tuple[Request, ...]

    def compress(self, bucket: BucketView, context: Context) -> Generator[Request, Tensor, Result]:
        yield self.requests[bucket.index]
        return Result(bucket.memory)


def test_only_requests_of_one_kind_dtype_and_purpose_travel_together() -> None:
    tensor = torch.zeros(4)
    kinds = (
        AllReduce(tensor),
        AllReduce(tensor, average=True),
        AllReduce(tensor, average=True, wire=torch.float16),
        AllReduce(tensor.double(), average=True),
        AllReduce(tensor.to_sparse(), average=True),
        AllGather(tensor),
        AllToAll(tensor),
    )
    asks = Asks(requests=(*kinds, *kinds))
    tasks = [_task(bucket, asks) for bucket in range(len(asks.requests))]
    for task in tasks:
        task.begin()
    made = bundles(tasks, Packings())
    assert sorted(len(bundle.tasks) for bundle in made) == [1, 1, 2, 2, 2, 2, 2, 2]  # the sparse ones travel alone
    assert sum(bundle.request.payload_bytes for bundle in made) == sum(r.payload_bytes for r in asks.requests)


def test_a_message_that_is_no_longer_used_is_let_go() -> None:
    workers = Workers(
        commhooks.make_compressor("powersgd", start_after=1), 1, zeros((30, 40), (30, 40)), buckets=2, policy="fused"
    )
    packings = workers.policies[0]._packings  # type: ignore[attr-defined]  # "Policy": the fused one has them
    for step in range(8):
        workers.step(normal(workers.parameters, 1, seed=step))
        assert len(packings) == (1 if step == 0 else 3 if step < 4 else 2)  # the dense one, P's and Q's


def test_a_request_after_the_last_one_is_refused() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Insatiable(Compressor):
        def compress(self, bucket: BucketView, context: Context) -> Generator[Request, Tensor, Result]:
            yield AllReduce(bucket.memory, last=True)
            yield AllReduce(bucket.memory)
            return Result(bucket.memory)

    policy = Fifo(Scripted(), lambda pending: True, lambda task: None)
    policy.add(_task(0, Insatiable()))
    policy.turn()
    with pytest.raises(commhooks.CompressorError, match="after a request marked last=True"):
        policy.turn()


def test_a_collective_that_fails_is_thrown_into_the_compressor() -> None:
    seen: list[BaseException] = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Watching(Compressor):
        def compress(self, bucket: BucketView, context: Context) -> Generator[Request, Tensor, Result]:
            try:
                yield AllReduce(bucket.memory)
            except commhooks.CollectiveError as error:
                seen.append(error)
                raise
            return Result(bucket.memory)

    for compressor in (Watching(), commhooks.WireDtype(inner=Watching(), dtype=torch.float16)):
        task = _task(0, compressor)
        task.begin()
        task.throw(commhooks.CollectiveError("the line is cut"))
    assert [str(error) for error in seen] == ["the line is cut"] * 2


# --- wrappers -------------------------------------------------------------------------------------------------------


def test_start_after_runs_the_other_compressor_first() -> None:
    compressor = commhooks.make_compressor("powersgd", rank=1, start_after=2)
    workers = Workers(compressor, 2, zeros((30, 40)))
    payloads = []
    for step in range(4):
        before = workers.traffic.payload_bytes
        workers.step(normal(workers.parameters, 2, seed=step))
        payloads.append(workers.traffic.payload_bytes - before)
    assert payloads == [4800, 4800, 280, 280]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("feedback", [False, True])
def test_a_wire_is_not_put_round_what_casts_by_itself(name: str, feedback: bool) -> None:
    inner = commhooks.make_compressor(name, error_feedback=feedback)
    for wrapped in (inner, commhooks.StartAfter(inner=inner, steps=3)):
        with pytest.raises(
            commhooks.SettingsError, match=r"WireDtype\(inner=.*: inner must leave the wire's dtype open"
        ):
            commhooks.WireDtype(inner=wrapped, dtype=torch.float16)


def test_a_cast_that_saves_nothing_is_not_made() -> None:
    """fp16 for bf16 has as many bytes, and a mean of 2e5 would become inf."""
    workers = Workers(commhooks.make_compressor("fp16"), 2, zeros((3,), dtype=torch.bfloat16))
    large = [[torch.full((3,), 2e5, dtype=torch.bfloat16)] for _ in range(2)]
    assert torch.equal(workers.step(large)[0][0], large[0][0])


@pytest.mark.parametrize("wrapper", ["StartAfter", "WireDtype", "ErrorFeedback"])
def test_a_wrapper_refuses_what_is_no_compressor(wrapper: str) -> None:
    every: dict[str, dict[str, Any]] = {"StartAfter": {"steps": 1}, "WireDtype": {"dtype": torch.float16}}
    settings = every.get(wrapper, {})
    with pytest.raises(commhooks.SettingsError, match=rf"{wrapper}\(inner='powersgd'\): inner must be a Compressor"):
        getattr(commhooks, wrapper)(inner="powersgd", **settings)


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
        stale.future.wait()


def test_only_sums_can_be_cast_on_the_wire() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Gathering(Compressor):
        def compress(self, bucket: BucketView, context: Context) -> Generator[Request, Tensor, Result]:
            yield AllGather(bucket.memory)
            return Result(bucket.memory)

    task = _task(0, commhooks.WireDtype(inner=Gathering(), dtype=torch.float16))
    with pytest.raises(commhooks.CompressorError, match="only sums can be cast on the wire.*asked for an all-gather"):
        task.begin()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "fp16"], ids=str)
def test_a_wire_that_cannot_sum_is_refused(dtype: Any) -> None:
    with pytest.raises(commhooks.SettingsError, match="dtype must be a floating-point torch.dtype of at least 16 bits"):
        commhooks.WireDtype(inner=commhooks.AllReduceMean(), dtype=dtype)
    with pytest.raises(commhooks.SettingsError, match=r"StartAfter\(steps=-1\): steps must"):
        commhooks.StartAfter(inner=commhooks.AllReduceMean(), steps=-1)


def test_error_feedback_refuses_what_leaves_nothing_out_or_remembers_by_itself() -> None:
    for inner in (commhooks.AllReduceMean(), commhooks.PowerSGD(), commhooks.NoOp()):
        with pytest.raises(commhooks.SettingsError, match=r"ErrorFeedback\(inner=.*inner must tell what it left out"):
            commhooks.ErrorFeedback(inner=inner)
    with pytest.raises(commhooks.SettingsError, match="inner must tell"):
        commhooks.make_compressor("all-reduce", error_feedback=True)


def test_the_word_error_feedback_means_the_wrapper_or_the_compressors_own() -> None:
    assert commhooks.make_compressor("fp16", error_feedback=True) == commhooks.ErrorFeedback(
        inner=commhooks.Cast(dtype=torch.float16)
    )
    assert commhooks.make_compressor("fp16", error_feedback=False) == commhooks.Cast(dtype=torch.float16)
    assert commhooks.make_compressor("powersgd", error_feedback=False) == commhooks.PowerSGD(error_feedback=False)
    assert commhooks.make_compressor("powersgd") == commhooks.PowerSGD()


def test_error_feedback_names_a_compressor_that_does_not_tell() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Forgetful(commhooks.AllReduceMean):
        @property
        def tells_unsent(self) -> bool:
            return True

    with pytest.raises(commhooks.CompressorError, match=r"Forgetful\(\) must tell what it left out"):
        Workers(commhooks.ErrorFeedback(inner=Forgetful()), 1, zeros((3,))).step([[torch.ones(3)]])


# --- state and statistics -------------------------------------------------------------------------------------------


def test_state_is_found_by_the_parameter_itself_and_takes_its_name() -> None:
    table = StateTable()
    first, second = torch.zeros(2), torch.zeros(2)
    assert (table.of(first).key, table.of(second).key) == ("#0", "#1")
    assert table.of(first) is table.of(first) is not table.of(second)
    table.bind([("weight", first)])
    assert table.of(first).key == "weight" and table.name_of(second) is None


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 2), (1, 5), (5, 1), (4, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("last_dimension_first", [False, True])
def test_a_matrix_is_a_view_of_every_element(shape: tuple[int, ...], last_dimension_first: bool) -> None:
    parameter = torch.zeros(shape)
    if last_dimension_first:
        parameter = parameter.permute(*reversed(range(len(shape)))).contiguous().permute(*reversed(range(len(shape))))
    memory = torch.arange(parameter.numel())
    form = form_of(parameter, "first-dimension")
    assert form is not None
    matrix = form.view(memory)
    assert matrix.shape == (shape[0], memory.numel() // shape[0])
    assert matrix.data_ptr() == memory.data_ptr() and sorted(matrix.flatten().tolist()) == memory.tolist()
    own = memory.as_strided(parameter.shape, parameter.stride())
    assert set(matrix[0].tolist()) == set(own[0].flatten().tolist())  # a row is what the first dimension indexes


def test_the_ledger_tells_the_last_step_from_all_of_them() -> None:
    ledger, traffic = Ledger(), Traffic()
    for step in range(3):
        for bucket in range(2):
            task = _task(bucket, Rounds(rounds=1))
            task.is_last = bucket == 1
            traffic.count(AllReduce(torch.zeros(10 * (step + 1))), world_size=2)
            ledger.enter(task, traffic)
    totals, last = ledger.totals(traffic), ledger.last_step()
    assert (totals.steps, totals.buckets, totals.collectives, totals.payload_bytes) == (3, 6, 6, 480)
    assert (last.steps, last.buckets, last.collectives, last.payload_bytes) == (1, 2, 2, 240)
    assert last.by_kind["all-reduce"].payload_bytes == 240 and totals.ratio == totals.gradient_bytes / 480
