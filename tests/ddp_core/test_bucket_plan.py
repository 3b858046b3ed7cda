"""Buckets in a checkpoint: a resumed run takes them over, and a plan that does not fit changes nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp_core.facts import Facts
from tests.ddp_core.models import MEAN, grads, ones, scale, wrap
from tests.world import run_world

facts = Facts()

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
}
RUNS = MODES | {"views that are kept": {"gradient_as_bucket_view": True}}  # zeroed, not dropped, before each step
CAP_MB = 0.03  # of the 25 KiB that a layer below has, two fill a bucket


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(7) for layer in (nn.Linear(80, 80), nn.Tanh())])


class Run:
    """A training run that can be saved and resumed."""

    def __init__(self, mode: str, file: str | None = None, with_plan: bool = True) -> None:
        self.ddp = wrap(model(), bucket_cap_mb=CAP_MB, **RUNS[mode])
        self.drops_gradients = mode in MODES
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=0.9)
        if file is not None:
            saved = torch.load(file, weights_only=True)
            self.ddp.module.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            if not self.drops_gradients:
                for parameter in self.ddp.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            assert not with_plan or self.ddp.load_bucket_plan(saved["plan"])

    def save(self, file: str) -> None:
        states = {"model": self.ddp.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(states | {"plan": self.ddp.bucket_plan()}, file)

    def train(self, rank: int, steps: range) -> list[Tensor]:
        for step in steps:
            inputs = torch.randn(4, 80, generator=torch.Generator().manual_seed(10 * step + rank))
            self.optimizer.zero_grad(set_to_none=self.drops_gradients)
            self.ddp(inputs).square().mean().backward()
            self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.ddp.parameters()]


def six_steps_saved_after_three(rank: int, folder: str) -> dict[str, list[Tensor]]:
    ends = {}
    for mode in RUNS:
        run = Run(mode)
        run.train(rank, range(3))
        if rank == 0:
            run.save(f"{folder}/{mode}")
        ends[mode] = run.train(rank, range(3, 6))
    return ends


def three_steps_resumed(rank: int, folder: str) -> dict[str, list[list[Tensor]]]:
    return {
        mode: [Run(mode, f"{folder}/{mode}", with_plan).train(rank, range(3, 6)) for with_plan in (True, False)]
        for mode in RUNS
    }


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_resumed_run_on_three_ranks_ends_with_the_bits_of_the_uninterrupted_one(tmp_path: Path) -> None:
    uninterrupted = run_world(six_steps_saved_after_three, 3, str(tmp_path))
    resumed = run_world(three_steps_resumed, 3, str(tmp_path))
    for rank, mode in itertools.product(range(3), RUNS):
        with_plan, without = resumed[rank][mode]
        assert equal(uninterrupted[rank][mode], with_plan), (mode, rank)
        assert not equal(uninterrupted[rank][mode], without), f"{mode}: buckets do not matter here, so nothing is shown"


class Sum(nn.Module):
    """The sum of the input times each of three weights, whose gradients come in the order c, b, a."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = scale(), scale(), scale()

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.a(x) + self.b(x) + self.c(x))


def trained(steps: int = 2, **options: Any) -> Any:
    """Return a DDP of ``Sum`` whose limit, 6 bytes, makes two buckets of it when they are rebuilt."""
    ddp = wrap(Sum(), bucket_cap_mb=6e-6, **options)
    for _ in range(steps):
        ddp(ones()).sum().backward()
    return ddp


OTHER = [["b.weight"], ["a.weight", "c.weight"]]


def buckets(ddp: Any) -> list[list[str]]:
    return [list(bucket.names) for bucket in ddp.reducer.layout.buckets]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_buckets_that_were_loaded_stay(mode: str, steps: int) -> None:
    ddp = trained(steps, **MODES[mode])
    before = grads(ddp)
    assert ddp.load_bucket_plan({"limits": [6], "buckets": OTHER, "rebuilt": True})
    assert grads(ddp) == before
    for step in range(steps, steps + 3):
        ddp(ones()).sum().backward()
        assert grads(ddp) == [[step + 1.0]] * 3
        assert ddp.bucket_plan() == {"limits": [6], "buckets": OTHER, "rebuilt": True}


UNFIT: dict[str, dict[str, Any]] = {
    "not rebuilt yet": {"rebuilt": False},
    "other limits": {"limits": [7]},
    "a parameter is missing": {"buckets": [["b.weight"], ["a.weight"]]},
    "a parameter is there twice": {"buckets": [*OTHER, ["b.weight"]]},
    "a stranger": {"buckets": [["b.weight"], ["a.weight", "d.weight"]]},
    "an empty bucket": {"buckets": [*OTHER, []]},
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("why", UNFIT)
def test_a_plan_that_does_not_fit_changes_nothing(why: str) -> None:
    fitting = {"limits": [6], "buckets": OTHER, "rebuilt": True}
    for steps in (0, 1, 2):
        ddp = trained(steps)
        before = ddp.bucket_plan(), ddp.reducer.layout.buckets
        assert ddp.load_bucket_plan(fitting | UNFIT[why]) is False
        assert (ddp.bucket_plan(), ddp.reducer.layout.buckets) == before
        ddp(ones()).sum().backward()
        assert ddp.bucket_plan()["rebuilt"] == (steps > 0)


@facts
def ranks_that_have_joined_follow_a_plan_that_was_loaded(rank: int) -> None:
    for mode in MODES.values():
        ddp = trained(0, **mode)
        assert ddp.load_bucket_plan({"limits": [6], "buckets": OTHER, "rebuilt": True})
        with ddp.join():
            for step in range(4 if rank == 0 else 1):
                ddp.zero_grad()
                ddp(ones(rank)).sum().backward()
                assert grads(ddp) == [[MEAN if step == 0 else 0.5]] * 3
        assert buckets(ddp) == OTHER


@facts
def memory_of_lazy_buckets_is_there_only_while_gradients_are_sent(rank: int) -> None:
    for mode in MODES.values():
        ddp = trained(0, **mode, lazy_bucket_allocation=True)
        seen = list[int]()

        def hook(state: list[int], bucket: Any, ddp: Any = ddp) -> Any:
            state.append(sum(one.flat.nbytes for one in ddp.reducer.layout.buckets))
            return dist.all_reduce(bucket.buffer().div_(2), async_op=True)

        ddp.register_comm_hook(seen, hook)
        for step in range(4):
            if step == 2:
                ddp.remove_comm_hook()
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(ones(rank)).sum().backward()
            assert not any(bucket.flat.nbytes for bucket in ddp.reducer.layout.buckets)
            ddp(ones(rank)).sum().backward()
            assert grads(ddp) == [[2 * MEAN]] * 3
            assert not any(bucket.flat.nbytes for bucket in ddp.reducer.layout.buckets)
        assert min(seen) > 0
        assert int(sum(map(int, ddp._get_ddp_logging_data()["bucket_sizes"].split(", ")))) == 12


@facts
def a_reduction_that_the_program_ends_gives_means_then_and_no_step_before(rank: int) -> None:
    for mode in MODES.values():
        ddp = trained(0, **mode)
        with pytest.raises(RuntimeError, match="set ddp.require_manual_backward_finalization = True"):
            ddp.finalize_backward()
        ddp.require_manual_backward_finalization = True
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        for _ in range(3):
            ddp.zero_grad()
            outputs = ddp(ones(rank)).sum()
            with pytest.raises(RuntimeError, match="no reduction to end"):
                ddp.finalize_backward()
            outputs.backward()
            with pytest.raises(RuntimeError, match="cannot be set while gradients are being reduced"):
                ddp.require_manual_backward_finalization = False
            for early in (optimizer.step, lambda ddp=ddp: ddp(ones())):
                with pytest.raises(RuntimeError, match="call finalize_backward after each backward pass"):
                    early()
            ddp.finalize_backward()
            assert grads(ddp) == [[MEAN]] * 3
            optimizer.step()
        ddp.require_manual_backward_finalization = False
        ddp.zero_grad()
        ddp(ones(rank)).sum().backward()
        assert grads(ddp) == [[MEAN]] * 3


test = facts.tests()
