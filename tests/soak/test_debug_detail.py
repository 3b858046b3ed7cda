"""TORCH_DISTRIBUTED_DEBUG=DETAIL, under which PyTorch's own DDP on Gloo and CPU is a segmentation fault."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import get_debug_level
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.parity.cases import CASES, Variant, variants
from tests.parity.training import first_difference, train
from tests.world import run_world


def chosen() -> list[Variant]:
    """Return one variant of every case."""
    return list({v.case: v for v in variants() if v.optimizer == "sgd" and v.view}.values())


def train_all(rank: int, level: str) -> list[Any]:
    assert get_debug_level().name == level
    histories = [train(rank, variant, "ours", 4) for variant in chosen()]
    hooked = train(rank, chosen()[0], "ours", 4, hook=with_allreduce_hook)
    return [
        {name: tensor.numpy() for name, tensor in state.items() if tensor.dtype != torch.bfloat16}
        for history in [*histories, hooked]
        for state in history
    ]


def with_allreduce_hook() -> tuple[object, Any]:
    return None, default_hooks.allreduce_hook


def test_training_under_detail_gives_the_bits_of_training_without() -> None:
    assert {variant.case for variant in chosen()} == set(CASES)
    plain, detailed = (
        run_world(train_all, 2, level, environment={"TORCH_DISTRIBUTED_DEBUG": level}, timeout=90)
        for level in ("OFF", "DETAIL")
    )
    for rank in range(2):
        histories = [
            [{n: torch.from_numpy(a) for n, a in state.items()} for state in run[rank]] for run in (plain, detailed)
        ]
        assert first_difference(*histories) is None
