"""The kernel alone is DDP: without wrapper and features it computes what PyTorch's class does, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.buckets import Layout, Limits
from ddp_core.construction import choose_process_group
from ddp_core.hooks import CommHook
from ddp_core.reducer import Reducer
from tests.parity import cases
from tests.parity.cases import Case, Variant
from tests.parity.test_hooks import HOOKS
from tests.parity.training import Hook, first_difference, train
from tests.world import run_world


class Bare(nn.Module):
    """A module whose forward pass prepares a reducer, and nothing else."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float, **_: object) -> None:
        super().__init__()
        self.module = module
        limits = Limits(rebuilt=(int(bucket_cap_mb * 2**20),))
        self.reducer = Reducer(Layout(list(module.named_parameters()), limits), choose_process_group(None, None))

    def forward(self, *inputs: Any) -> Any:
        """Run the module within an iteration of the reducer."""
        if not self.reducer.paused:
            self.reducer.before_forward()
        self.reducer.leave_iteration()
        outputs = self.module(*inputs)
        if not self.reducer.paused:
            self.reducer.after_forward()
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank."""
        self.reducer.paused = True
        yield
        self.reducer.paused = False

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Reduce with a hook."""
        self.reducer.set_hook(CommHook(state, hook, "hook"))


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.other = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.last_norm(self.other(self.norm(self.one(x)).relu())))


def resnet() -> nn.Module:
    stem = nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU()
    return nn.Sequential(*stem, Residual(12), Residual(12), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))


LOCAL_STATISTICS = {"broadcast_buffers": False}  # a feature's work
RESNET = Case(name="ResNet", model=resnet, batch=cases.images, options=LOCAL_STATISTICS)
ROWS: list[tuple[Case, str, float]] = [
    (RESNET, "", 0.004),
    (RESNET, "fp16", 0.004),
    (cases.CASES["transformer, tied weights"], "", 0.004),
    (cases.CASES["transformer, tied weights"], "all-reduce", 0.004),
    (cases.CASES["transformer, tied weights"], "PowerSGD", 25.0),  # PyTorch's crashes with several buckets on Gloo
    (cases.CASES["gradient accumulation"], "", 0.002),
]


def train_all(rank: int, steps: int) -> list[str]:
    complaints = []
    for case, hook, cap in ROWS:
        cases.CASES[case.name] = case
        variant = Variant(case=case.name, optimizer="sgd", view=False, static=False, bucket_cap_mb=cap)
        histories = [train(rank, variant, which, steps, HOOKS.get(hook)) for which in ("torch", Bare)]
        if difference := first_difference(*histories):
            complaints.append(f"{case.name}, {hook}: {difference}")
    return complaints


@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_kernel_trains_with_the_bits_of_pytorchs_ddp(world_size: int) -> None:
    complaints = run_world(train_all, world_size, 6, timeout=110, check_exit=False)
    assert complaints == [[]] * world_size, "\n".join(line for lines in complaints for line in lines)
