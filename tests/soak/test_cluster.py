"""Clusters of network namespaces: their rates, changes while they are used, and what is left of them."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from commhooks.experiments.cluster import Cluster, clusters, follow, why_not
from tests.soak.streams import connect, rates, transfer

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(240),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

FRAME, PAYLOAD = 1514, 1448
OWNER = [sys.executable, "-m", "tests.soak.streams"]


def left_by(owner: subprocess.Popen[str]) -> list[Path]:
    """Return the namespaces and records of a process's clusters."""
    found = (Path("/run/netns").glob(f"commhooks-run-{owner.pid}-*"), Path("/run/commhooks").glob(f"run-{owner.pid}*"))
    return [path for paths in found for path in paths]


@contextmanager
def process(what: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that owns clusters; it is killed in the end."""
    with subprocess.Popen([*OWNER, what], stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize("hosts", [2, 4, 8])
@pytest.mark.parametrize("rate", [1e6, 10e6, 100e6, 1e9])
def test_a_stream_has_the_rate_of_the_link_and_so_have_streams_around_a_ring(hosts: int, rate: float) -> None:
    seconds = 3.0 if rate < 1e9 else 1.0
    with Cluster.create(hosts, up=rate, down=rate) as cluster:
        ring = [connect(cluster, host, (host + 1) % hosts) for host in range(hosts)]
        rates(ring, int(rate / 8 / 4))  # TCP finds the rate
        [alone] = rates(ring[:1], int(rate / 8 * seconds))
        together = rates(ring, int(rate / 8 * seconds))
        print(f"{hosts} hosts, {rate / 1e6:g} Mbit/s: alone {alone / rate:.4f}, in the ring {min(together) / rate:.4f}")
    # At 1 Mbit/s the packets that pass a bucket at once are 4 % of these bytes.
    assert 0.98 < alone / rate < (1.02 if rate > 1e6 else 1.08)
    if rate <= 100e6:  # acknowledgements share the link with data; two cores cannot move several times 1 Gbit/s
        assert all(0.9 < each / rate < (1.02 if rate > 1e6 else 1.08) for each in together)


def test_a_rate_changes_at_once_while_a_stream_uses_it_and_what_waits_is_kept() -> None:
    begin, arrivals = time.monotonic(), list[tuple[float, int]]()
    with Cluster.create(2, up=100e6, down=100e6) as cluster:
        pair = connect(cluster, 0, 1)
        transfer(pair, 2_000_000)
        begin = time.monotonic()
        with follow(cluster, [(1.0, 10e6), (2.0, 200e6), (3.0, 50e6)], start=begin):
            transfer(pair, 40_000_000, lambda total: arrivals.append((time.monotonic() - begin, total)))
        for at, rate in ((0.0, 100e6), (1.0, 10e6), (2.0, 200e6), (3.0, 50e6)):
            (first, before), *_, (last, after) = [one for one in arrivals if at + 0.3 < one[0] < at + 0.95]
            assert 8 * (after - before) * FRAME / PAYLOAD / (last - first) == pytest.approx(rate, rel=0.1)
        # The counters begin anew if the queue is replaced, which would lose what waits in it.
        assert cluster.state()[0].sent > 42_000_000 * FRAME / PAYLOAD


def test_two_clusters_use_the_same_addresses_and_do_not_meet() -> None:
    with Cluster.create(2, up=10e6, down=10e6) as one, Cluster.create(2, up=20e6, down=20e6) as other:
        assert one.name != other.name and one.address(0) == other.address(0)
        slow, fast = rates([connect(one, 0, 1), connect(other, 0, 1)], 2_000_000)
        assert fast / slow == pytest.approx(2, rel=0.05)
        one.remove()
        assert other in clusters() and transfer(connect(other, 1, 0), 1000) < 1


@pytest.mark.timeout(600)
def test_nothing_is_left_after_a_process_was_killed_at_any_moment_of_making_or_removing_a_cluster() -> None:
    randomness, left = random.Random(0), 0
    for _ in range(20):
        with process("again and again") as owner:
            deadline = time.monotonic() + 30
            while not left_by(owner) and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(randomness.uniform(0, 0.3))
            owner.send_signal(signal.SIGKILL)
        left += bool(left_by(owner))
        clusters()
        assert not left_by(owner)
    assert left > 5, "most kills must find a cluster"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_the_process_that_started_them_and_their_cluster_goes_at_the_latest_with_the_next(
    end: signal.Signals,
) -> None:
    with process("ranks") as owner:
        assert owner.stdout is not None
        assert [owner.stdout.readline() for _ in range(2)] == ["here\n", "here\n"]
        ranks = psutil.Process(owner.pid).children(recursive=True)
        assert len(ranks) >= 2
        owner.send_signal(end)
        owner.wait(20)
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    clusters()
    assert not left_by(owner)
