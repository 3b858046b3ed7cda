"""The bytes that our statistics say were moved, against the counters of the hosts' interfaces."""

from __future__ import annotations

import statistics

import pytest

from commhooks import make_compressor
from commhooks.experiments.cluster import Cluster, why_not
from commhooks.experiments.launch import run_world
from tests.soak.counting_on_hosts import Counted, Exchange, count

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(240),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

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
