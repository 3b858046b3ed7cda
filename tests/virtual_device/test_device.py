"""What the device runs, in which order, and what it reports."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.virtual_device import begin, ranks, report
from tests.world import WorldError, run_world

pytestmark = pytest.mark.virtual_device

RUNS = ["eager", "late", "random:1", "random:2"]
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _begun() -> None:
    begin("late")


def test_late_runs_nothing_before_the_host_waits() -> None:
    target = torch.empty(4, pin_memory=True)
    target.zero_()
    target.copy_(torch.ones(4, device=CUDA), non_blocking=True)
    assert target.tolist() == [0.0] * 4
    torch.cuda.synchronize()
    assert target.tolist() == [1.0] * 4


@pytest.mark.parametrize("run", RUNS)
def test_two_streams_that_write_in_no_order_are_a_race(run: str) -> None:
    begin(*ranks.parse(run))
    x, side = torch.zeros(8, device=CUDA), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    x.mul_(2)
    (read, written) = report().races
    assert "mul.out reads on stream 0 what add.out writes on stream" in read
    assert "mul.out writes on stream 0 what add.out writes on stream" in written


@pytest.mark.parametrize("waits", [False, True])
def test_a_host_that_reads_pinned_memory_before_its_copy_is_a_race(waits: bool) -> None:
    kept = torch.empty(4, pin_memory=True)
    kept.copy_(torch.ones(4, device=CUDA), non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    if waits:
        event.synchronize()
    total = float(kept.sum())
    assert (total == 4) is waits
    assert (
        "sum reads by the host what copy_ to the host writes on stream 0, in no order" in report().races
    ) is not waits


def test_every_host_wait_is_listed_with_its_place_and_may_be_refused() -> None:
    x = torch.ones(4, device=CUDA)
    x.sum().item()
    x.nonzero()
    x.cpu()
    torch.cuda.current_stream().record_event().synchronize()
    waits = report().host_waits
    assert {wait.what for wait in waits} == {"item", "nonzero", "copy_", "event.synchronize"}
    assert {wait.place.rpartition(":")[0] for wait in waits} == {__file__}
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation: item"):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- across processes ----
@pytest.mark.parametrize("run", ["eager", "late", "random:1"])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_collectives_across_processes(backend: str, run: str) -> None:
    run_world(_collectives, 2, backend=backend, environment=ranks.environment(run))


def _collectives(rank: int) -> None:
    def mine(count: int = 6, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.arange(count, device=CUDA) + 10 * rank).to(dtype)

    total = mine()
    dist.all_reduce(total, async_op=True).wait()
    assert total.tolist() == [10.0 + 2 * n for n in range(6)]
    largest = mine(dtype=torch.bfloat16)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert largest.tolist() == [10.0 + n for n in range(6)]
    gathered = [torch.empty(3, device=CUDA) for _ in range(2)]
    dist.all_gather(gathered, mine(3))
    assert [each.tolist() for each in gathered] == [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]
    given = mine(3)
    dist.broadcast(given, src=1)
    assert given.tolist() == [10.0, 11.0, 12.0]
    swapped = torch.empty(4, device=CUDA)
    if dist.get_backend() == "nccl":  # PyTorch's Gloo has no such form for CUDA
        dist.all_to_all_single(swapped, mine(4))
        assert swapped.tolist() == [2.0 * rank, 2.0 * rank + 1, 10 + 2.0 * rank, 11 + 2.0 * rank]
        row = torch.empty(3, device=CUDA)
        dist.reduce_scatter_tensor(row, mine())
        assert row.tolist() == [10.0 + 2 * (n + 3 * rank) for n in range(3)]
        joined = torch.empty(6, device=CUDA)
        dist.all_gather_into_tensor(joined, mine(3))
        assert joined.tolist() == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]
    dist.barrier()


def test_ranks_that_disagree_are_told() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(_disagree, 2, backend="nccl", environment=ranks.environment("late"))
    assert "ranks disagree about collective 0 of their group" in str(caught.value)
    assert "all-reduce of 16 bytes of Float" in str(caught.value)


def _disagree(rank: int) -> None:
    dist.all_reduce(torch.ones(4 + rank, device=CUDA))
    torch.cuda.synchronize()
