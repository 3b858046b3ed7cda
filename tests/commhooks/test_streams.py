"""Residuals in the host's memory, which a stream writes when it comes to it: on a stream that comes late.

tests/gpu has the same on a real one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from commhooks import devices
from commhooks.engine.guards import keep_what_is_unused, take_part_with_zeros
from commhooks.engine.undo import UndoLog
from commhooks.language import AllReduce, BucketView, Compressor, Context, Entry, Exchange, Place
from commhooks.language.entries import RESIDUAL, Declared
from commhooks.language.memory import commit
from commhooks.state.loss_scale import LossScale
from commhooks.state.table import StateTable
from tests.commhooks.alone import ALONE, bucket_of, run_alone


@dataclasses.dataclass(eq=False)
class Copy:
    """A copy that is queued; those before it on the stream are done before it."""

    stream: LateStream
    kept: Tensor
    value: Tensor
    done: bool = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.stream.come_to(self)


class LateStream:
    """Do what is queued as late as possible: when somebody waits for it."""

    def __init__(self) -> None:
        self.queued: list[Copy] = []

    def queue(self, kept: Tensor, value: Tensor) -> Copy:
        self.queued.append(Copy(self, kept, value.clone()))
        return self.queued[-1]

    def come_to(self, last: Copy | None = None) -> None:
        """Do everything up to one copy, or all there is."""
        while self.queued and (last is None or not last.done):
            copy = self.queued.pop(0)
            copy.kept.copy_(copy.value)
            copy.done = True


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    late = LateStream()
    monkeypatch.setattr(devices, "_queue", late.queue)
    return late


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Halving(Compressor):
    """Send half of gradient and residual, and keep the rest, by way of a stream."""

    stream: LateStream
    dtype: torch.dtype | None = None
    """Of the residual."""

    def state(self, place: Place) -> Declared:
        return {RESIDUAL: Entry(kind="residual", dtype=self.dtype)}

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        (tile,) = bucket.tiles
        residuals = [slot.state(RESIDUAL) for slot in bucket.slots]
        self.stream.come_to()  # a copy to the device stands in the same queue
        owed = torch.cat([residual.clone() for residual in residuals])
        half = (bucket.memory + owed) / 2
        bucket.memory.copy_(half)
        (mean,) = yield AllReduce(tile.part(), average=True, last=True)
        for residual, unsent in zip(residuals, half.split([r.numel() for r in residuals]), strict=True):
            devices.queue_copy(residual, unsent)
        tile.write(mean)


class Run:
    """One worker with two parameters, and the residuals of one step in which each gradient was 4."""

    def __init__(self, stream: LateStream) -> None:
        self.compressor = Halving(stream=stream)
        self.table = StateTable()
        parameters, memory = [torch.zeros(2), torch.zeros(3)], torch.full((5,), 4.0)
        self.bucket = bucket_of(parameters, memory, self.table, self.compressor)

    @property
    def residuals(self) -> list[Tensor]:
        return [residual for *_, residual in self.table.residuals()]

    def step(self, gradient: float, around: Callable[[BucketView, Exchange], Exchange] | None = None) -> Tensor:
        """Run one step in which all gradients are the same; return the mean."""
        self.bucket.memory.fill_(gradient)
        exchange = self.compressor.compress(self.bucket, ALONE)
        return run_alone(self.bucket, exchange if around is None else around(self.bucket, exchange))


def check(residuals: Sequence[Tensor], expected: float) -> None:
    assert [set(residual.tolist()) for residual in residuals] == [{expected}] * len(residuals)


def test_a_rank_that_has_joined_gets_its_residual_back_after_what_was_queued(stream: LateStream) -> None:
    run = Run(stream)
    run.step(4.0)
    assert set(run.step(0.0, take_part_with_zeros).tolist()) == {0.0}
    stream.come_to()
    check(run.residuals, 2.0)


def test_parameters_that_nobody_uses_keep_their_residual(stream: LateStream) -> None:
    run = Run(stream)
    run.step(4.0)
    run.step(0.0, keep_what_is_unused)
    stream.come_to()
    check(run.residuals, 2.0)


def test_a_step_that_does_not_count_is_undone_after_what_was_queued(stream: LateStream) -> None:
    run, undo = Run(stream), UndoLog()
    for gradient in (4.0, float("nan")):
        undo.begin_step()
        undo.expect(last=True)
        undo.settle(run.step(gradient, undo.watch))
    stream.come_to()
    check(run.residuals, 2.0)


def test_the_loss_scale_changes_what_was_queued(stream: LateStream) -> None:
    run, scale = Run(stream), LossScale()
    run.step(4.0)
    scale.announce(8.0)
    scale.apply_to(lambda: {1: run.residuals}, torch.device("cpu"))
    stream.come_to()
    check(run.residuals, 16.0)


def test_residuals_that_are_laid_out_anew_hold_what_was_queued(stream: LateStream) -> None:
    run = Run(stream)
    run.step(4.0)
    run.table.lay_out(run.bucket, Halving(stream=stream, dtype=torch.float64))
    stream.come_to()
    assert [residual.dtype for residual in run.residuals] == [torch.float64] * 2
    check(run.residuals, 2.0)


def test_what_is_loaded_replaces_what_was_queued(stream: LateStream) -> None:
    run = Run(stream)
    run.step(4.0)
    kinds = run.table.kinds()
    own = {f"weights.{number}": {RESIDUAL: torch.full((size,), 7.0)} for number, size in enumerate((2, 3))}
    run.table.load({}, own, kinds)
    stream.come_to()
    check(run.residuals, 7.0)


def test_what_is_known_of_copies_does_not_grow_with_memory_that_is_gone(
    stream: LateStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_EVENTS_TO_KEEP", 8)
    monkeypatch.setattr(devices, "_last", {})
    kept = [torch.zeros(1) for _ in range(100)]
    for one in kept:
        devices.queue_copy(one, torch.ones(1))
        stream.come_to()
    assert len(devices._last) <= 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_commit_writes_into_narrower_memory_where_it_may(dtype: torch.dtype) -> None:
    memory = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype)
    commit(memory, torch.tensor([[5.0, 6.0], [7.0, 8.0]]), torch.tensor([[True], [False]]))
    assert memory.tolist() == [[5.0, 6.0], [3.0, 4.0]]
    assert memory.dtype == dtype
