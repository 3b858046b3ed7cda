"""Memory that streams work on later than the host: in one process, on a device that comes late."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks import devices, make_compressor
from commhooks.communicators import LockstepGroup
from commhooks.devices import SideStream, future_on, mark_of
from commhooks.engine.guards import keep_what_is_unused, take_part_with_zeros
from commhooks.engine.undo import UndoLog
from commhooks.language import AllReduce, BucketView, Compressor, Context, Entry, Exchange
from commhooks.language.randomness import seeded_normal
from commhooks.scheduling.channels import ConnectionChannel
from commhooks.scheduling.inline import InlineScheduler
from commhooks.scheduling.task import BucketTask
from commhooks.state.loss_scale import LossScale
from commhooks.state.table import RESIDUAL_STORAGES, StateTable
from tests.commhooks.alone import ALONE, bucket_of, run_alone
from tests.gpu.late import LATE, LateCommunicator

pytestmark = pytest.mark.gpu

SHAPE = (300, 400)
DEVICE = "cuda"


class Run:
    """One worker with one matrix on a GPU; every step begins late."""

    def __init__(self, storage: Any) -> None:
        self.gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        self.memory = torch.empty(self.gradient.numel(), device=DEVICE)
        self.compressor = make_compressor("powersgd", rank=2)
        self.parameter, self.table = torch.zeros(SHAPE, device=DEVICE), StateTable(0, 1, storage)
        self.bucket = bucket_of([self.parameter], self.memory, self.table, self.compressor)
        self.kept = self.table.of(self.parameter)["residual"]
        self.stream = torch.cuda.Stream()
        torch.cuda.synchronize()

    def step(self, factor: float, guard: str = "") -> Tensor:
        """Run a step on the side stream with a gradient times `factor`; return its mean."""
        exchange = self.compressor.compress(self.bucket, ALONE)
        if guard:
            exchange = {"joined": take_part_with_zeros, "unused": keep_what_is_unused}[guard](self.bucket, exchange)
        with torch.cuda.stream(self.stream), torch.no_grad():
            torch.cuda._sleep(LATE)
            self.memory.copy_(self.gradient.view(-1) * factor)
            return run_alone(self.bucket, exchange)

    def residual(self) -> Tensor:
        torch.cuda.synchronize()
        return self.kept.cpu().clone()


def test_a_narrow_residual_is_committed() -> None:
    narrow, wide = Run("bf16"), Run("fp32")
    for run in (narrow, wide):
        run.step(1.0)
    assert narrow.kept.dtype == torch.bfloat16
    assert torch.equal(narrow.residual(), wide.residual().bfloat16())


@pytest.mark.parametrize("guard", ["joined", "unused"])
@pytest.mark.parametrize("storage", RESIDUAL_STORAGES)
def test_a_rank_that_sends_nothing_keeps_its_residual(guard: str, storage: str) -> None:
    run = Run(storage)
    run.step(1.0)
    run.step(0.0, guard)
    ours, expected = run.residual(), Run(storage)
    expected.step(1.0)
    assert torch.equal(ours, expected.residual())


@pytest.mark.parametrize("storage", RESIDUAL_STORAGES)
def test_a_step_that_is_undone_leaves_the_residual_of_the_one_before(storage: str) -> None:
    run, undo = Run(storage), UndoLog()
    for factor in (1.0, float("nan")):
        undo.begin_step()
        undo.expect(last=True)
        exchange = undo.watch(run.bucket, run.compressor.compress(run.bucket, ALONE))
        with torch.cuda.stream(run.stream), torch.no_grad():
            torch.cuda._sleep(LATE)
            run.memory.copy_(run.gradient.view(-1) * factor)
            undo.settle(run_alone(run.bucket, exchange))
    expected = Run(storage)
    expected.step(1.0)
    assert torch.equal(run.residual(), expected.residual())


@pytest.mark.parametrize("storage", RESIDUAL_STORAGES)
def test_the_loss_scale_multiplies_what_was_committed(storage: str) -> None:
    run, scale = Run(storage), LossScale()
    run.step(1.0)
    scale.announce(8.0)
    torch.cuda.current_stream().wait_stream(run.stream)  # as after a backward pass
    scale.apply_to(lambda: {1: [run.kept]}, torch.device(DEVICE))
    expected = Run(storage)
    expected.step(1.0)
    assert torch.equal(run.residual(), 8 * expected.residual())


def test_a_residual_on_the_host_is_loaded_after_what_was_committed() -> None:
    run = Run("host")
    run.step(1.0)
    torch.cuda.current_stream().wait_stream(run.stream)  # as after a backward pass
    run.table.load({}, {"weights.0": {"residual": torch.full(SHAPE, 7.0)}}, run.table.kinds())
    assert set(run.residual().tolist()) == {7.0}


def test_what_is_known_of_copies_does_not_grow_with_memory_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_EVENTS_TO_KEEP", 8)
    monkeypatch.setattr(devices, "_last", {})
    kept, value = [torch.zeros(1, pin_memory=True) for _ in range(100)], torch.ones(1, device=DEVICE)
    for one in kept:
        devices.queue_copy(one, value)
        torch.cuda.synchronize()
    assert len(devices._last) <= 8


def test_a_scaler_that_is_disabled_multiplies_nothing() -> None:
    """A training script passes GradScaler(enabled=False) for bf16."""
    run, scale = Run("fp32"), LossScale()
    scale.follow(torch.amp.GradScaler(DEVICE, enabled=False))
    run.step(1.0)
    torch.cuda.current_stream().wait_stream(run.stream)  # as after a backward pass
    before = run.kept._version
    for _ in range(2):
        scale.apply_to(lambda: {1: [run.kept]}, torch.device(DEVICE))
    assert run.kept._version == before, "nothing was written"
    assert scale.of_gradients == 1.0


def test_what_was_loaded_is_not_reused_before_it_was_read() -> None:
    elements = 1_000_003  # nobody else asks for so many
    gradient, table = torch.zeros(elements, device=DEVICE), StateTable()
    table.bind([("weights.0", gradient)])
    own = {"weights.0": {"residual": torch.full((elements,), 3.0, dtype=torch.bfloat16, device=DEVICE)}}
    table.load({}, own, {"weights.0": {"residual": Entry(kind="residual")}})
    del own
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(LATE)
        bucket_of([gradient], gradient, table, make_compressor("fp16", error_feedback=True))
        read = table.of(gradient)["residual"]
    rubbish = [torch.full((elements,), 7.0, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16)]
    torch.cuda.synchronize()
    assert set(read.tolist()) == {3.0}
    assert len(rubbish) == 2


def test_a_random_basis_makes_nobody_wait() -> None:
    like = torch.zeros(1, device=DEVICE)
    expected = seeded_normal((64, 8), 1, like).cpu()  # and the pinned memory is there
    torch.cuda._sleep(LATE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = seeded_normal((64, 8), 1, like)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(drawn.cpu(), expected)
    assert torch.equal(expected, seeded_normal((64, 8), 1, torch.zeros(1)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Noting(Compressor):
    """All-reduce, and note two places in each bucket's work: when it is formed, and when its mean is there."""

    formed: list[torch.cuda.Event] = dataclasses.field(default_factory=list)
    done: list[torch.cuda.Event] = dataclasses.field(default_factory=list)

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        self.formed.append(torch.cuda.current_stream().record_event())
        yield AllReduce(*(tile.part() for tile in bucket.tiles), average=True, last=True)
        self.done.append(torch.cuda.current_stream().record_event())


def test_a_bucket_is_compressed_while_the_one_before_waits_for_its_collective() -> None:
    device = torch.device(DEVICE, torch.cuda.current_device())
    communicator = LateCommunicator(LockstepGroup(1).communicators()[0], LATE)
    streams = SideStream(device), SideStream(device)
    scheduler, channel = InlineScheduler(communicator, lambda terms, kernels: None, streams), ConnectionChannel()
    scheduler.open(channel, "")
    compressor = Noting()
    torch.cuda.synchronize()
    for number in range(2):
        view = BucketView(number, torch.ones(3, device=device))
        task = BucketTask(
            exchange=compressor.compress(view, ALONE),
            bucket=view,
            futures=[future_on(device)],
            step=0,
            is_last=number == 1,
            parameters=lambda: "its own",
            world_size=1,
            ready=[mark for mark in (mark_of(device),) if mark],
        )
        scheduler.submit(channel, task)
    compressor.formed[1].synchronize()
    assert not compressor.done[0].query(), "the second bucket waited for the first one's mean"
    torch.cuda.synchronize()
    assert all(done.query() for done in compressor.done)


@pytest.mark.parametrize("allowed", [False, True])
def test_sent_and_owed_add_up_whether_tf32_is_allowed_or_not(allowed: bool) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        run = Run("fp32")
        mean = run.step(1.0)
        residual = run.residual()
    finally:
        torch.set_float32_matmul_precision(before)
    gradient = run.gradient.double().cpu().view(-1)
    distance = float((gradient - residual.double() - mean.double().cpu()).abs().max())
    # As in tests/commhooks/test_precision.py, for one rank and r = 2.
    assert distance <= 2 * (9 * 2 + 2) * 2.0**-24 * float(torch.linalg.matrix_norm(gradient.view(SHAPE), 2))
