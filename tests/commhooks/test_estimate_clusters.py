"""Estimates of 32 clusters beside arithmetic that uses none of the model: one bucket, ready when the compute ends."""

from __future__ import annotations

import itertools
import math
import random
from typing import NamedTuple

import pytest

from experiments import predicting
from experiments.predicting.candidates import DENSE
from experiments.predicting.costs import Costs, HookCosts
from tests.tiers import rows

COMPUTE, OPTIMIZER, HOP, ROUND = 0.02, 0.003, 1e-4, 2e-4
COPY_RATE = 10e9
COPIES_PER_BYTE = {DENSE: 14.0, "fp16": 23.0, "random-k:ratio=0.01": 14.0, "int8": 14.0}
BLOCK, SCALE = 128, 4  # of int8: elements, and bytes for each
ON_THE_LINK = (1514 + 33) / 1448  # bytes of frames, and of acknowledgements in the other direction, for one of data


class Cluster(NamedTuple):
    parameters: int
    ranks: int
    rate: float
    latency: float
    backend: str


NAMED = (
    Cluster(2**18, 16, 1e9, 0.05, "gloo"),  # latency that a hook of fewer messages saves
    Cluster(2**18, 16, 1e7, 0.05, "gloo"),
    Cluster(2**18, 16, 1e9, 0.05, "none"),
    Cluster(2**18, 64, 1e9, 0.005, "gloo"),
    Cluster(2**18, 4, 100e9, 50e-6, "gloo"),  # bytes that cost the processor more than the link
    Cluster(2**18, 4, 100e9, 50e-6, "none"),
    Cluster(2**18, 64, 100e9, 50e-6, "gloo"),
    Cluster(2**18, 64, 100e9, 0.0, "none"),
    Cluster(2**16, 64, 1e8, 50e-6, "gloo"),  # few blocks for many ranks
    Cluster(2**16, 64, 1e8, 0.0, "none"),
    Cluster(2**18, 2, 1e9, 50e-6, "gloo"),  # two ranks, which exchange in both directions at once
    Cluster(2**18, 2, math.inf, 0.0, "none"),
)
_ALL = itertools.product((2**16, 2**18), (2, 3, 8, 32), (1e6, 3e8, 25e9), (0.0, 2e-4, 0.02), ("gloo", "none"))
CLUSTERS = (*NAMED, *(Cluster(*one) for one in random.Random(0).sample(list(_ALL), 20)))


FREE = Costs(
    hooks={hook: HookCosts.free(hook, copies) for hook, copies in COPIES_PER_BYTE.items()},
    hop_seconds=HOP,
    round_seconds=ROUND,
    copy_rate=COPY_RATE,
    machine={},
    versions={},
)


def by_hand(cluster: Cluster, hook: str, rate: float) -> float:
    """Return the seconds of a step: each collective takes the link or the processor, and its messages wait."""
    n, W = cluster.parameters, cluster.ranks
    others, with_gloo = W - 1, cluster.backend == "gloo"

    def collective(data: float, messages: int, hops: int, sent: float) -> float:
        wire = 8 * (data * ON_THE_LINK + 390 * messages) / rate
        processor = with_gloo * COPIES_PER_BYTE[hook] * sent / COPY_RATE
        return max(wire, processor) + hops * (cluster.latency + with_gloo * HOP)

    def all_reduce(payload: float) -> float:
        data = 2 * others / W * payload
        return collective(data, 4 * others, 2 * others, data)

    if hook == "int8":
        served = math.ceil(n / BLOCK / W) * (BLOCK + SCALE)  # bytes of the blocks that one rank serves, padded
        sent = others * served
        if W == 2 and served >= 16 * 1024:  # a message in each direction, at the same time
            exchange = gather = collective(served, 1, 1, sent)
        else:
            two, is_large = W == 2, served >= 128 * 1024
            data, messages = sent * (2 if two else 1.5), others
            if is_large:  # over two groups; up to 250 kB for one rank delay an announcement to another
                data, messages = sent + min(served, 250_000), 2 * others
            exchange = collective(data, messages, 2 if two else 1, sent)
            gather = collective(sent * (1.5 if two else 1), 2 * others, others, sent)
        link, rounds = exchange + gather, 2
    else:
        elements = {DENSE: 4 * n, "fp16": 2 * n}.get(hook, 4 * (math.ceil(n / 100) + 1))  # and whether all is finite
        link, rounds = all_reduce(elements), 1
    return COMPUTE + OPTIMIZER + link + with_gloo * rounds * ROUND


@pytest.mark.parametrize("cluster", [*CLUSTERS[:3], *rows([(cluster,) for cluster in CLUSTERS[3:]])], ids=str)
def test_an_estimate_is_what_arithmetic_says_at_every_rate(cluster: Cluster) -> None:
    n, ranks, rate, latency, backend = cluster
    found = predicting.estimate(
        n,
        compute=COMPUTE,
        optimizer=OPTIMIZER,
        ranks=ranks,
        rate=rate,
        latency=latency,
        bucket_cap_mb=1000,
        matrix=n,
        copy_rate=COPY_RATE,
        backend=backend,
        costs=FREE,
    )
    assert found.backend == backend
    dense = by_hand(cluster, DENSE, rate)
    for hook in COPIES_PER_BYTE:
        own = found.of(hook)
        assert own.time.seconds == pytest.approx(by_hand(cluster, hook, rate), rel=1e-5)
        assert own.speed_up == pytest.approx(dense / by_hand(cluster, hook, rate), rel=1e-5)
        if hook == DENSE:
            continue
        edges = [edge for limits in own.pays_between for edge in limits]
        for other in (*(10 ** (power / 2) for power in range(9, 28)), rate):
            if any(abs(other / edge - 1) < 0.01 for edge in edges if edge) and math.isfinite(other):
                continue
            is_faster = by_hand(cluster, hook, other) < by_hand(cluster, DENSE, other)
            assert is_faster == any(low <= other <= high for low, high in own.pays_between), (hook, other)


def test_there_are_twelve_clusters_of_the_kinds_that_misled_and_twenty_others() -> None:
    assert (len(set(NAMED)), len(set(CLUSTERS))) == (12, 32)
