"""PyTorch's hooks and broadcasts over the emulated link take its time, and fail in words; every moment counts once."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

import commhooks
from commhooks.experiments.devices import Stopwatch
from commhooks.experiments.links.gloo import Course, course_of
from commhooks.experiments.links.link import EmulatedLink, LinkSettings, Wire
from commhooks.experiments.links.linked_group import LinkedGroup, LinkedWork
from commhooks.experiments.links.waits import WaitClock
from commhooks.experiments.specs import Spec
from commhooks.experiments.training.measure import StepClock
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.experiments.training.stock import register_stock
from tests.ddp_core.facts import Facts
from tests.parity.training import ddp_class

facts = Facts(check_exit=False)  # PyTorch's DDP aborts in about 6 % of exits
LINK = LinkSettings(bits_per_second=2e6)
WEIGHTS = 60 * 60 + 60  # of the linear layer
BYTES = 4 * WEIGHTS


class Booked(Wire):
    """A link that adds up for how long it was used."""

    seconds = 0.0

    def carry(self, course: Course) -> float:
        self.seconds += self.link.seconds_of(course)
        return super().carry(course)


def linked(waits: WaitClock | None = None) -> LinkedGroup:
    assert dist.group.WORLD is not None
    return LinkedGroup(dist.group.WORLD, Booked(LINK), waits)


def ddp_over(group: LinkedGroup, which: str = "torch", **settings: Any) -> Any:
    model = nn.Sequential(nn.Linear(60, 60), nn.BatchNorm1d(60, affine=False))
    return ddp_class(which)(model, process_group=group, **settings)


def step(ddp: Any) -> None:
    torch.manual_seed(0)
    ddp(torch.randn(4, 60)).square().mean().backward()


class Failing(dist.Work):
    """A work whose collective fails, as Gloo's does if another rank dies."""

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(ConnectionError("connection closed by peer"))
        return future


@facts
def a_step_takes_the_links_time_whoever_compresses(rank: int) -> None:
    def hooked(hook: str) -> tuple[Any, Booked]:
        group = linked()
        ddp = ddp_over(group)
        if hook.startswith("torch."):
            register_stock(ddp, Spec(hook), group)
        else:
            commhooks.attach(
                ddp, hook, process_group=group.inner, wrap_communicator=lambda inner: EmulatedLink(inner, group.wire)
            )
        assert isinstance(group.wire, Booked)
        return ddp, group.wire

    buffers = LINK.seconds_of(course_of("broadcast", 4 * 60 + 4 * 60 + 8, 2))
    for names, bytes_each in ((("torch.none", "all-reduce"), 4), (("torch.fp16", "fp16"), 2)):
        least = buffers + LINK.seconds_of(course_of("all-reduce", bytes_each * WEIGHTS, 2))
        for name in names:
            ddp, wire = hooked(name)
            for _ in range(2):  # PyTorch's DDP agrees on its buckets meanwhile
                step(ddp)
            begin, before = time.perf_counter(), wire.seconds
            step(ddp)
            # Nothing passes the link twice, and the step sleeps until it is through. More is the machine's load.
            assert least <= wire.seconds - before < 1.1 * least, name
            assert time.perf_counter() - begin >= least, name


@facts
def parameters_and_buffers_pass_the_link(rank: int) -> None:
    for which in ("torch", "ours"):
        group = linked()
        begin = time.perf_counter()
        ddp = ddp_over(group, which)
        assert time.perf_counter() - begin >= LINK.seconds_of(course_of("broadcast", BYTES, 2))
        before = group.traffic["broadcast"].payload_bytes
        ddp(torch.randn(4, 60))
        sent = group.traffic["broadcast"].payload_bytes - before
        assert sent == 4 * 60 + 4 * 60 + 8  # running mean, running variance, and the count of batches


@facts
def powersgd_of_several_buckets_is_refused_before_it_can_abort(rank: int) -> None:
    for which in ("torch", "ours"):
        group = linked()
        ddp = ddp_over(group, which, bucket_cap_mb=0.0001)
        register_stock(ddp, Spec("torch.powersgd"), group)
        step(ddp)  # the first step of either class has one bucket
        with pytest.raises(RuntimeError, match=r"fails over Gloo if the gradients are in several buckets"):
            step(ddp)


@facts
def collectives_of_torch_distributed_work_on_the_group(rank: int) -> None:
    group: Any = linked()
    gathered = [torch.zeros(3), torch.zeros(3)]
    dist.all_gather(gathered, torch.full((3,), float(rank)), group=group)
    assert [row.tolist() for row in gathered] == [[0.0] * 3, [1.0] * 3]
    total = torch.full((10_000,), 1.0 + rank)  # a sixth of a second on this link
    work = dist.all_reduce(total, group=group, async_op=True)
    assert work is not None
    with pytest.raises(RuntimeError, match=r"not done after 0\.0001 s"):
        work.wait(timedelta(seconds=1e-4))
    work.wait()
    assert (total == 3.0).all()
    assert work.is_completed()
    group.close()


test = facts.tests()


def test_a_collective_that_fails_raises_for_whoever_waits_and_does_not_wait_for_the_link() -> None:
    wire = Wire(LINK)
    work = LinkedWork(Failing(), wire.clock() + 600, wire)
    for wait in (work.wait, work.get_future().wait):
        with pytest.raises(RuntimeError, match="ConnectionError: connection closed by peer"):
            wait()
    assert work.is_completed()
    work.thread.join(10)
    assert not work.thread.is_alive()


def test_a_pytorch_whose_class_hangs_over_an_emulated_link_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    group: Any = LinkedGroup.__new__(LinkedGroup)
    with pytest.raises(ValueError, match=r"PyTorch 2\.6\.0.* hangs .* Use PyTorch 2\.8"):
        wrap_in_ddp(torch.nn.Linear(1, 1), "torch", None, group)


def test_a_step_is_split_into_parts_that_add_up() -> None:
    now = [0.0]
    waits = WaitClock(clock=lambda: now[0])
    model = nn.Linear(2, 2)

    def buffers(module: nn.Module, inputs: object) -> None:
        waits.note(now[0], now[0] + 0.5)
        now[0] += 0.5

    ddp = nn.Sequential(model)
    ddp.register_forward_pre_hook(buffers)  # as a DDP waits for them: when it is called, before it calls the model
    clock = StepClock(ddp, model, waits, Stopwatch(clock=waits.clock))
    clock.begin()
    now[0] = 1.0  # the loss prepares its batch
    loss = ddp(torch.ones(1, 2)).sum()
    now[0] = 3.0  # and calls the model twice
    loss = loss + ddp(torch.ones(1, 2)).sum()
    now[0] = 5.0  # forward and backward
    loss.backward()
    waits.note(4.5, 5.5)  # half of it hidden behind the backward pass
    waits.note(6.0, 8.0)
    waits.note(6.5, 7.5)  # beside another: every moment counts once
    now[0] = 9.0
    clock.backward_ended()
    now[0] = 10.0  # the optimizer
    split = clock.end()
    clock.remove()
    assert (split.compute, split.waiting, split.compression, split.hidden) == (5.0, 3.5, 1.5, 0.5)
    assert split.compute + split.waiting + split.compression == pytest.approx(split.seconds)
