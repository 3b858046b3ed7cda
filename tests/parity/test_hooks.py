"""PyTorch's own communication hooks run unmodified on our DDP, and give what they give on PyTorch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook

from tests.parity.cases import Variant
from tests.parity.training import Hook, first_difference, train
from tests.tiers import thorough
from tests.world import run_world

STEPS = 6  # PowerSGD compresses from the fourth on
MANY_STEPS = 50
MODELS_AND_VIEWS = list(itertools.product(("mlp", "cnn with batchnorm", "transformer, tied weights"), (False, True)))
ONE_BUCKET = None  # PyTorch's sizes, and models of a few KiB
SEVERAL = 0.002  # MiB


def power_sgd(rank: int = 1) -> tuple[object, Hook]:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=3)
    return state, powerSGD_hook.powerSGD_hook


def fp16_of_power_sgd() -> tuple[object, Hook]:
    state, hook = power_sgd()
    return state, default_hooks.fp16_compress_wrapper(hook)


HOOKS: dict[str, Callable[[], tuple[object, Hook]]] = {
    "all-reduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "noop": lambda: (None, debugging_hooks.noop_hook),
    "PowerSGD": power_sgd,
    "PowerSGD of rank 2": lambda: power_sgd(2),
    "fp16 of PowerSGD": fp16_of_power_sgd,
}


def train_with_hooks(rank: int, steps: int, whole: bool) -> list[str]:
    """Train the whole table, or each hook with two of the models, one of them with views; return what differed."""
    complaints = []
    for number, (name, hook) in enumerate(HOOKS.items()):
        # PowerSGD of PyTorch's crashes with several buckets on Gloo, whatever the DDP.
        bucket_cap_mb = ONE_BUCKET if "PowerSGD" in name else SEVERAL
        for case, view in MODELS_AND_VIEWS if whole else (MODELS_AND_VIEWS[number], MODELS_AND_VIEWS[number - 3]):
            variant = Variant(case=case, optimizer="sgd", view=view, static=False, bucket_cap_mb=bucket_cap_mb)
            histories: list[Any] = [train(rank, variant, which, steps, hook) for which in ("torch", "ours")]
            difference = first_difference(*histories)
            if difference:
                complaints.append(f"{name} on {variant}: {difference}")
    return complaints


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world_size", "steps", "whole"),
    [
        (3, STEPS, False),
        *thorough([(2, STEPS, True), (3, STEPS, True)]),
        *(pytest.param(ranks, MANY_STEPS, True, marks=pytest.mark.soak) for ranks in (2, 3)),
    ],
)
def test_pytorchs_hooks_give_the_same_bits_on_both(world_size: int, steps: int, whole: bool) -> None:
    complaints = run_world(train_with_hooks, world_size, steps, whole, timeout=880, check_exit=False)
    assert complaints == [[]] * world_size, "\n".join(line for lines in complaints for line in lines)
