"""PyTorch's own communication hooks run unmodified on our DDP, and give what they give on PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)

from tests.parity.cases import Variant
from tests.parity.training import Hook, first_difference, train
from tests.world import run_world

STEPS = 10  # PowerSGD compresses from the fourth on
MANY_STEPS = 50
ONE_BUCKET = None  # PyTorch's sizes, and models of a few KiB
SEVERAL = 0.002  # MiB


def allreduce() -> tuple[object, Hook]:
    return None, default_hooks.allreduce_hook


def fp16() -> tuple[object, Hook]:
    return None, default_hooks.fp16_compress_hook


def noop() -> tuple[object, Hook]:
    return None, debugging_hooks.noop_hook


def power_sgd(rank: int = 1) -> tuple[object, Hook]:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=3)
    return state, powerSGD_hook.powerSGD_hook


def power_sgd_rank_2() -> tuple[object, Hook]:
    return power_sgd(2)


def fp16_of_power_sgd() -> tuple[object, Hook]:
    state, hook = power_sgd()
    return state, default_hooks.fp16_compress_wrapper(hook)


# PowerSGD of PyTorch's crashes with several buckets on Gloo, whatever the DDP.
TABLE: list[tuple[Callable[[], tuple[object, Hook]], float | None]] = [
    (allreduce, SEVERAL),
    (fp16, SEVERAL),
    (noop, SEVERAL),
    (power_sgd, ONE_BUCKET),
    (power_sgd_rank_2, ONE_BUCKET),
    (fp16_of_power_sgd, ONE_BUCKET),
]


def train_with_hooks(rank: int, cases: list[str], steps: int) -> list[str]:
    complaints = []
    for hook, bucket_cap_mb in TABLE:
        for case in cases:
            for view in (False, True):
                variant = Variant(case=case, optimizer="sgd", view=view, static=False, bucket_cap_mb=bucket_cap_mb)
                histories: list[Any] = [train(rank, variant, which, steps, hook) for which in ("torch", "ours")]
                difference = first_difference(*histories)
                if difference:
                    complaints.append(f"{hook.__name__} on {variant}: {difference}")
    return complaints


def assert_equal_histories(world_size: int, cases: list[str], steps: int, timeout: float) -> None:
    complaints = run_world(train_with_hooks, world_size, cases, steps, timeout=timeout, check_exit=False)
    assert complaints == [[]] * world_size, "\n".join(line for lines in complaints for line in lines)


on_both_world_sizes = pytest.mark.parametrize(
    ("world_size", "cases"), [(2, ["mlp", "cnn with batchnorm"]), (3, ["mlp", "transformer, tied weights"])]
)


@on_both_world_sizes
def test_pytorchs_hooks_give_the_same_bits_on_both(world_size: int, cases: list[str]) -> None:
    assert_equal_histories(world_size, cases, STEPS, timeout=180)


@pytest.mark.soak
@pytest.mark.timeout(900)
@on_both_world_sizes
def test_pytorchs_hooks_give_the_same_bits_on_both_for_50_steps(world_size: int, cases: list[str]) -> None:
    assert_equal_histories(world_size, cases, MANY_STEPS, timeout=880)
