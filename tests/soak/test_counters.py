"""The bytes that our statistics say were moved, against the counters of the hosts' interfaces."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks import make_compressor
from commhooks.experiments.cluster import INTERFACE, Cluster, interface_bytes, why_not
from commhooks.experiments.launch import Send, run_world

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(240),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A compressor, and the tensor that it averages."""

    compressor: commhooks.Compressor
    shape: tuple[int, ...]
    steps: int


@dataclasses.dataclass(frozen=True)
class Counted:
    """The bytes that one rank sent for an exchange, a step."""

    exchange: int  # its place in the list
    moved: float  # as our statistics say: the mean over ranks
    sent: float  # as the interface says


def count(rank: int, ranks: int, argument: tuple[Exchange, ...], send: Send) -> None:
    """Run every exchange on a host of a cluster, and send what was counted."""
    torch.set_num_threads(1)
    for number, exchange in enumerate(argument):
        gradient = torch.randn(exchange.shape, generator=torch.Generator().manual_seed(rank))
        exchanger = commhooks.Exchanger({"layer": gradient}, exchange.compressor)
        exchanger.average({"layer": gradient.clone()})  # connections are made, and state is laid out
        before = exchanger.statistics()
        dist.barrier()
        sent, _ = interface_bytes(INTERFACE)
        for _ in range(exchange.steps):
            exchanger.average({"layer": gradient.clone()})
        dist.barrier()
        moved = exchanger.statistics().moved_bytes - before.moved_bytes
        sent = interface_bytes(INTERFACE)[0] - sent
        send(Counted(number, moved / exchange.steps, sent / exchange.steps))
        exchanger.close()


LAYER = (2048, 2048)
LARGE = {
    "dense": Exchange(make_compressor("all-reduce"), LAYER, 3),
    "fp16": Exchange(make_compressor("fp16"), LAYER, 3),
    "PowerSGD": Exchange(make_compressor("powersgd", rank=128, start_after=0), LAYER, 4),
    "two-hop": Exchange(make_compressor("int8"), LAYER, 4),
    "sparse": Exchange(make_compressor("top-k", ratio=0.1), LAYER, 3),
}
SMALL = {f"{size} kB": Exchange(make_compressor("all-reduce"), (256 * size,), 100) for size in (1, 8, 64)}


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_bytes_are_within_5_percent_of_the_counters_and_a_small_message_costs_less_than_a_kilobyte_more(
    hosts: int,
) -> None:
    exchanges = LARGE | SMALL
    received: list[Counted] = []
    with Cluster.create(hosts, up=1e9, down=1e9) as cluster:
        # run_world is typed for any message; this rank function sends these.
        run_world(count, hosts, tuple(exchanges.values()), received.append, timeout=200, cluster=cluster)  # type: ignore[arg-type]
    for number, name in enumerate(exchanges):
        of_ranks = [one for one in received if one.exchange == number]
        assert len(of_ranks) == hosts
        moved, sent = (statistics.fmean(getattr(one, field) for one in of_ranks) for field in ("moved", "sent"))
        print(f"{hosts} hosts, {name}: {moved:,.0f} bytes moved a step, {sent / moved:.3f} of them on the interface")
        if name in LARGE:
            assert moved > 1e6
            assert 1 < sent / moved < 1.05
        else:
            # Packets' headers, acknowledgements, and Gloo's own messages: each step around the ring has some.
            assert 0 < sent - moved < 1000 * 2 * (hosts - 1) + 0.05 * moved
