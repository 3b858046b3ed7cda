"""What is counted of an operator, and of hooks on a CPU; the bounds of PowerSGD are ratchets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commhooks import tensors
from commhooks.compressors.powersgd import low_rank, orthonormal
from commhooks.language import memory
from commhooks.scheduling import packing
from experiments.studies.bench.given import Shape
from experiments.studies.gpu_cost.counting import Cost, Counting
from experiments.studies.gpu_cost.rank import MODELS, count, fake_group

CPU = torch.device("cpu")
SMALL = [(96, 64), (64,)]
ELEMENTS = 96 * 64 + 64


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    with fake_group() as group:
        yield group


def cost_of(run: Callable[[], object]) -> Cost:
    counting = Counting(CPU)
    with counting:
        run()
    return counting.cost


@pytest.mark.parametrize(
    ("run", "floats"),
    [
        (lambda a, b: a.add_(b), 30),
        (lambda a, b: a.copy_(b), 20),
        (lambda a, b: torch.add(a, b, out=b), 30),
        (lambda a, b: a + b, 30),
        (lambda a, b: a.zero_(), 10),
        (lambda a, b: a.fill_(1.0), 10),
        (lambda a, b: torch._foreach_copy_([a], [b]), 20),
        (lambda a, b: a[:1].expand(10).clone(), 11),
        (lambda a, b: torch.addmm(a.view(5, 2), b[:5].view(5, 1), b[:2].view(1, 2), out=a.view(5, 2)), 27),
    ],
)
def test_bytes_are_what_is_read_and_what_is_written(run: Callable[[Tensor, Tensor], object], floats: int) -> None:
    a, b = torch.zeros(10), torch.zeros(10)
    assert cost_of(lambda: run(a, b)).bytes == 4 * floats


def test_the_host_waits_where_it_reads_a_value_or_a_size_depends_on_one() -> None:
    memory = torch.ones(4)
    assert cost_of(lambda: memory.sum().item()).waits == 1
    assert cost_of(memory.nonzero).waits == 1
    assert cost_of(lambda: memory[memory > 0]).waits == 1
    assert cost_of(lambda: memory + 1).waits == 0


@pytest.mark.parametrize("hook", ["all-reduce", "fp16", "bf16"])
def test_a_plain_hook_launches_at_most_two_kernels_more_than_pytorchs(hook: str, group: dist.ProcessGroup) -> None:
    ours, peers = (count(name, SMALL, group, CPU).cost for name in (hook, f"torch.{hook}"))
    assert ours.launches <= peers.launches + 2
    assert ours.collectives == peers.collectives == 1


def let_work_be_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the code for a GPU run on the CPU's memory, where compressors ask whether work is queued."""
    for module in (low_rank, orthonormal, memory, packing):
        monkeypatch.setattr(module, "runs_later", lambda tensor: True)
    monkeypatch.setattr(tensors, "_LARGE", sys.maxsize)  # what is large is looked at otherwise on a CPU


@pytest.mark.parametrize(
    ("shapes", "launches"),
    [
        pytest.param(MODELS["GPT block"], 64, id="GPT block"),
        pytest.param(MODELS["ResNet-18"], 200, id="ResNet-18"),
        pytest.param([(5_000, 800)], 35, id="embedding"),
    ],
)
def test_on_a_gpu_powersgd_launches_few_kernels_and_touches_no_more_bytes_than_pytorchs(
    shapes: Sequence[Shape], launches: int, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_work_be_queued(monkeypatch)
    ours, peers = (count(name, shapes, group, CPU).cost for name in ("powersgd:rank=4", "torch.powersgd"))
    assert ours.launches <= launches  # a ratchet: fewer are welcome, and become the bound
    assert ours.waits == 0
    assert ours.bytes <= 1.05 * peers.bytes  # pytorch's keeps its residual whether or not the step is finite


def test_pytorchs_hooks_count_what_their_code_says(group: dist.ProcessGroup) -> None:
    hooks = ("torch.all-reduce", "torch.fp16", "torch.powersgd")
    dense, cast, low_rank = (count(hook, SMALL, group, CPU) for hook in hooks)
    assert dense.cost.by_operator == {"div_": 1, "allreduce_": 1}
    assert cast.cost.by_operator == {"_to_copy": 1, "div_": 1, "allreduce_": 1, "copy_": 1}
    assert dense.cost.bytes == 8 * ELEMENTS
    assert cast.cost.bytes == (4 + 2 + 4 + 2 + 4) * ELEMENTS
    assert low_rank.cost.collectives == 3  # what is not compressed, P and Q
    assert low_rank.residual_bytes == 4 * ELEMENTS
