"""Estimates, simulations and plans are one prediction: they agree, and what it says is monotone."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import pytest
from torch import nn

from experiments import predicting
from experiments.predicting import Profile
from experiments.predicting.candidates import DENSE, label_in_profile
from experiments.predicting.costs import Backend, Costs
from experiments.predicting.link import Link
from experiments.predicting.predicting import Unlinked
from experiments.predicting.series import Counted, Series
from experiments.predicting.sizes import square_matrices
from experiments.predicting.step_time import Bucket, Stage, Step, step_time
from experiments.predicting.tables import Stated
from experiments.simulate.request import Request
from experiments.simulate.simulating import simulate_measured
from experiments.specs import Spec
from tests.costs_then import AS_THEN
from tests.tiers import thorough

COMPUTE, OPTIMIZER, COPY_RATE = 0.05, 0.004, 14e9
WITHIN = 1e-6  # 5 % was the goal: the rules by which a simulation extrapolates are those of the tables


class Cluster(NamedTuple):
    """A hook on a cluster; rates in bits per second, latencies in seconds."""

    hook: str
    ranks: int
    rate: float
    latency: float = 50e-6
    ranks_per_host: int = 1
    cores: int = 1
    backend: str = "gloo"


CLUSTERS = (
    Cluster(DENSE, 2, 1e9),
    Cluster(DENSE, 12, 1e8),
    Cluster(DENSE, 64, 1e10, ranks_per_host=8),
    Cluster(DENSE, 1024, 1e11, backend="none"),
    Cluster("fp16", 3, 1e9, 0.0),
    Cluster("fp16", 32, 1e10),
    Cluster("fp16", 256, 1e9, 1e-3, backend="none"),
    Cluster("int8", 2, 1e9),
    Cluster("int8", 6, 3e8),
    Cluster("int8", 24, 1e10, cores=2),
    Cluster("int8", 64, 1e9, ranks_per_host=4),
    Cluster("int8", 100, 1e8, backend="none"),
    Cluster("top-k:ratio=0.01", 4, 1e9),
    Cluster("top-k:ratio=0.01", 12, 1e10, 0.0, cores=2),
    Cluster("top-k:ratio=0.01", 64, 1e9),
    Cluster("top-k:ratio=0.01", 256, 1e10, backend="none"),
    Cluster("powersgd:rank=4", 5, 1e8),
    Cluster("powersgd:rank=4", 16, 1e9, 2e-3),
    Cluster("powersgd:rank=4", 128, 1e10, ranks_per_host=8, cores=2),
    Cluster("powersgd:rank=4", 1024, 1e9, backend="none"),
)
HOOKS = tuple(dict.fromkeys(cluster.hook for cluster in CLUSTERS))


def a_model() -> nn.Module:
    """Return a model of 1.2 million parameters: wide and narrow matrices, and vectors."""
    return nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 512), nn.LayerNorm(512), nn.Linear(512, 700))


@functools.cache
def measured() -> Series:
    """Return profiles as one of 2 to 16 ranks, in which compression took what the tables say.

    What the ranks of a cluster send is counted, as it is when a simulation is measured.
    """
    costs = Costs.read().hooks
    shapes = [tuple(parameter.shape) for parameter in a_model().parameters()]
    stated = Stated(shapes=shapes, compute=COMPUTE, optimizer=OPTIMIZER, bucket_cap_mb=1.0)

    def as_one_of(ranks: int, *hooks: str) -> Profile:
        return stated.profile({hook: costs[hook] for hook in hooks}, ranks, 4 / COPY_RATE)

    counted = []
    for cluster in CLUSTERS:
        label = label_in_profile(cluster.hook)
        buckets = as_one_of(cluster.ranks, cluster.hook).hooks[label].buckets
        payloads = tuple(tuple(one.sends for one in bucket.rounds) for bucket in buckets)
        counted.append(Counted(label, cluster.ranks, payloads))
    return Series(tuple(as_one_of(ranks, *HOOKS) for ranks in (2, 4, 8, 16)), tuple(counted))


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_estimate_and_simulation_agree(cluster: Cluster) -> None:
    """The simulation interpolates and extrapolates compression, which the estimate takes from tables for any ranks."""
    estimated = predicting.estimate(
        a_model(),
        compute=COMPUTE,
        optimizer=OPTIMIZER,
        ranks=cluster.ranks,
        rate=cluster.rate,
        latency=cluster.latency,
        ranks_per_host=cluster.ranks_per_host,
        cores=cluster.cores,
        bucket_cap_mb=1.0,
        hooks=[cluster.hook],
        copy_rate=COPY_RATE,
        backend=cluster.backend,
    )
    link = Link(rate=cluster.rate, latency=cluster.latency, ranks_per_host=cluster.ranks_per_host)
    request = Request(
        hooks=(Spec.parse(cluster.hook),),
        ranks=(cluster.ranks,),
        links=(link,),
        cores=cluster.cores,
        backend=cluster.backend,
        copy_rate=None if cluster.backend == "none" else COPY_RATE,
    )
    (point,) = simulate_measured(request, measured()).points
    assert point.time.seconds == pytest.approx(estimated.of(cluster.hook).time.seconds, rel=WITHIN)


def test_the_stated_clusters_are_twenty() -> None:
    assert len(set(CLUSTERS)) == 20


RATES = (1e8, 1e9, 1e10, 1e11, math.inf)
LATENCIES = (20e-3, 1e-3, 50e-6, 0.0)
RANKS = (64, 16, 8, 4, 2)
PARAMETERS = (256e6, 64e6, 16e6, 4e6, 1e6)
AXES = ("rate", "latency", "ranks", "parameters")
"""Of the grid, each from what must be slowest to what must be fastest."""
SLOWER = {
    DENSE: (0, 0, 0, 0),
    "fp16": (0, 0, 0, 0),
    "int8": (0, 4, 0, 0),
    "top-k:ratio=0.01": (10, 8, 0, 0),
    "powersgd:rank=4": (5, 4, 4, 0),
}
"""At how many points of 500 the next one along each axis is slower, with one core; see docs/guide/simulate.md."""
MOST_SLOWER, MOST_SLOWER_BESIDE = 0.026, 0.004  # with one core, and with two

Point = tuple[int, ...]
"""The places of a rate, a latency, a number of ranks and a number of parameters."""


@functools.cache
def profile(hook: str, parameters: float, ranks: int) -> Profile:
    """Return a profile from tables; the payloads of large models take seconds to count."""
    stated = Stated(shapes=square_matrices(parameters, 1e6), compute=8e-9 * parameters, are_alike=True)
    return stated.profile({hook: AS_THEN.hooks[hook]}, ranks, 4 / COPY_RATE)


@functools.cache
def grid(hook: str, cores: int) -> dict[Point, float]:
    """Return the seconds of a step at 500 points."""
    backend = Backend("gloo", 4 / COPY_RATE, AS_THEN)
    found: dict[Point, float] = {}
    for (p, parameters), (w, ranks) in itertools.product(enumerate(PARAMETERS), enumerate(RANKS)):
        own = profile(hook, parameters, ranks)
        step = Unlinked.of(own, own.hooks[label_in_profile(hook)], cores=cores)
        for (r, rate), (d, latency) in itertools.product(enumerate(RATES), enumerate(LATENCIES)):
            link = backend.carry(Link(rate=rate, latency=latency), hook)
            found[r, d, w, p] = step.over(link).seconds
    return found


def slower(hook: str, cores: int, axis: int) -> list[float]:
    """Return by which part the next point along an axis is slower, where it is."""
    seconds = grid(hook, cores)
    found = []
    for point, here in seconds.items():
        onwards = tuple(place + (number == axis) for number, place in enumerate(point))
        if seconds.get(onwards, 0.0) > here * (1 + 1e-9):
            found.append(seconds[onwards] / here - 1)
    return found


FORMS = pytest.mark.parametrize("hook", thorough(HOOKS, unless=lambda hook: hook not in ("fp16", "int8")))
"""Counting what int8 sends takes seconds; fp16 is an all-reduce, too."""


@FORMS
def test_steps_are_monotone_but_where_a_faster_link_delays_the_backward_pass(hook: str) -> None:
    assert len(grid(hook, 1)) == 500
    on_one_core = [slower(hook, 1, axis) for axis in range(len(AXES))]
    assert tuple(map(len, on_one_core)) == SLOWER[hook]
    assert max((part for parts in on_one_core for part in parts), default=0.0) < MOST_SLOWER


@FORMS
def test_with_a_core_for_the_worker_hardly_any_step_is_slower_on_a_faster_link(hook: str) -> None:
    beside = [part for axis in range(len(AXES)) for part in slower(hook, 2, axis)]
    assert len(beside) <= 3 and max(beside, default=0.0) < MOST_SLOWER_BESIDE


def test_a_faster_link_can_delay_the_backward_pass() -> None:
    """An answer that comes before the last gradients is unpacked before them, so the last bucket is sent later."""
    early = Bucket(0.1, (Stage(0.0, (("all-reduce", 1_000_000),)),), after=0.05)
    last = Bucket(0.2, (Stage(0.0, (("all-reduce", 10_000_000),)),))
    step = Step(compute=0.2, buckets=(early, last))
    slow, fast = (step_time(step, Link(rate=rate, algorithm="ring"), 2).seconds for rate in (79e6, 81e6))
    assert slow == pytest.approx(0.1 + 8 / 79 + 80 / 79)  # the answer comes at 201 ms: unpacked beside a transfer
    assert fast == pytest.approx(0.2 + 0.05 + 80 / 81)  # at 199 ms
    assert fast > slow
