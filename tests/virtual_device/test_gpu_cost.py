"""What hooks launch on a device, counted, beside PyTorch's own; the bounds of PowerSGD are ratchets."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from commhooks.compressors import PowerSGD
from tests.virtual_device import begin, report
from tests.virtual_device.counting import Counting
from tests.virtual_device.one_rank import MODELS, count, fake_group

pytestmark = pytest.mark.virtual_device

CUDA = torch.device("cuda", 0)
SMALL = [(96, 64), (64,)]
POWERSGD = "powersgd:rank=4"
LAUNCHES = {"GPT block": 64, "ResNet-18": 200, "embedding": 35}
"""Of PowerSGD at rank 4, by model; fewer are welcome, and become the bound."""

LAUNCHES_OF_CODES = {"int8": 84, "fp8": 80, "sign": 88}
"""Of a run of blocks among 8 ranks; fewer are welcome, and become the bound."""


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    begin("empty")
    with fake_group() as group:
        yield group


@pytest.mark.parametrize("hook", ["all-reduce", "fp16", "bf16"])
def test_a_plain_hook_launches_at_most_two_kernels_more_than_pytorchs(hook: str, group: dist.ProcessGroup) -> None:
    ours, peers = (count(name, SMALL, group, CUDA) for name in (hook, f"torch.{hook}"))
    assert ours.launches <= peers.launches + 2
    assert ours.bytes <= peers.bytes
    assert ours.waits == peers.waits == 0


def test_pytorchs_hooks_count_what_their_code_says(group: dist.ProcessGroup) -> None:
    elements = 96 * 64 + 64
    dense, cast, low_rank = (count(f"torch.{hook}", SMALL, group, CUDA) for hook in ("all-reduce", "fp16", "powersgd"))
    assert dense.by_operator == {"div_": 1, "allreduce_": 1}
    assert cast.by_operator == {"_to_copy": 1, "div_": 1, "allreduce_": 1, "copy_": 1}
    assert (dense.bytes, cast.bytes) == (8 * elements, (4 + 2 + 4 + 2 + 4) * elements)
    assert low_rank.collectives == 3  # what is not compressed, P and Q


@pytest.mark.parametrize("model", LAUNCHES)
def test_powersgd_launches_few_kernels_and_makes_the_host_wait_nowhere(model: str, group: dist.ProcessGroup) -> None:
    ours = count(POWERSGD, MODELS[model], group, CUDA)
    assert ours.launches <= LAUNCHES[model]
    assert ours.waits == 0
    assert ours.collectives == 2


@pytest.mark.parametrize("model", ["GPT block", "ResNet-18"])
def test_powersgd_launches_at_most_twelve_kernels_a_group_and_five_a_further_matrix_besides_qr(
    model: str, group: dist.ProcessGroup
) -> None:
    ours = count(POWERSGD, MODELS[model], group, CUDA)
    compressed = [shape for shape in MODELS[model] if PowerSGD(rank=4).compresses(torch.empty(shape, device="meta"))]
    groups = {(shape[0], math.prod(shape[1:])) for shape in compressed}
    most = 12 * len(groups) + 5 * (len(compressed) - len(groups))
    assert ours.launches - ours.by_operator["linalg_qr"] <= most


@pytest.mark.parametrize("model", ["GPT block", "ResNet-18"])
def test_powersgd_touches_about_as_many_bytes_as_pytorchs_which_cannot_refuse_a_step(
    model: str, group: dist.ProcessGroup
) -> None:
    ours, peers = (count(name, MODELS[model], group, CUDA) for name in (POWERSGD, "torch.powersgd"))
    assert ours.bytes <= 1.05 * peers.bytes


@pytest.mark.parametrize("rows", [256, 1024])
@pytest.mark.parametrize("code", LAUNCHES_OF_CODES)
def test_a_code_launches_as_many_kernels_for_a_run_however_long_and_makes_the_host_wait_nowhere(
    code: str, rows: int, group: dist.ProcessGroup
) -> None:
    ours = count(code, [(rows, 1024)], group, CUDA)
    assert ours.launches <= LAUNCHES_OF_CODES[code]
    assert ours.waits == 0
    assert ours.collectives == 2


def test_the_device_counts_as_many_kernels_and_waits_as_operators_are_seen_to_launch() -> None:
    memory, many = torch.zeros(10, device=CUDA), [torch.zeros(2, device=CUDA) for _ in range(3)]
    together = torch.empty(3, 2, device=CUDA)
    begin("eager")
    counting = Counting(CUDA)
    with counting:
        memory.add_(1).view(2, 5).t()
        torch.stack(many, out=together)
        memory.sum().item()
    seen = report()
    assert counting.cost.waits == seen.host_waits.total() == 1
    assert counting.cost.launches == seen.kernels + 1  # the copy by which the host reads, which is no kernel
