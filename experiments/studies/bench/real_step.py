"""What PowerSGD adds to a whole training step, over what a plain all-reduce adds: a GPT of 4.08 million parameters.

Each hook trains a copy of its own, in turns on 2 ranks. A step with `noop` is compute alone, so the ratio is
(PowerSGD - noop) / (all-reduce - noop), of the medians of a launch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch.distributed as dist

import commhooks
from commhooks.experiments.cluster import why_not
from commhooks.experiments.hooks import make_hook, policy_of
from commhooks.experiments.launch import Tell
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.results.summary import Spread
from commhooks.experiments.specs import Spec
from commhooks.experiments.training.stepper import Stepper
from experiments.studies.bench.memory import KEEPS_FREED
from experiments.studies.bench.rows import Row, Seconds
from experiments.studies.ranks import UNLIMITED_HOSTS, on_ranks, same_step
from experiments.studies.turns import on_slowest, turns_of

SENTENCE = (
    "A training step of a GPT of 4.08 million parameters on 2 ranks of one thread each, by `ddp_core`, on two hosts "
    "(network namespaces) whose link has no limit, or on the loopback if there can be none: what PowerSGD of rank 4 "
    "adds to a step that exchanges nothing (`noop`), over what a plain all-reduce adds to it, in wall time, and in CPU "
    "time of all threads of a rank. Each launch has new processes in which all hooks take turns, and gives one ratio "
    "of medians; shown are the median and the quartiles of five launches. Noise: the all-reduce against itself, by "
    "another copy of the model."
)
RANKS = 2
LAUNCHES = 5
PEERS = {"noop": "noop", "all-reduce": "all-reduce", "all-reduce again": "all-reduce"}
OURS = {policy: f"powersgd:rank=4,policy={policy}" for policy in ("fused", "fifo")}
BUCKETS = {"1 bucket": 1000.0, "4 buckets": 4.0}
"""The buckets, and the size in MiB that makes so many."""
CLOCKS: Mapping[str, Callable[[], float]] = {"CPU time": time.process_time, "wall time": time.perf_counter}
HOSTS, LOOPBACK = "two hosts", "loopback"

Taken = dict[str, Seconds]
"""The seconds of a step in each round of a launch, by clock and hook."""


def measure(quick: bool, tell: Tell) -> list[Row]:
    """Return a row for each number of buckets, policy and clock."""
    task, launches, rounds, calls = ("gpt:size=tiny", 1, 2, 1) if quick else ("gpt:size=base", LAUNCHES, 8, 3)
    place, link = HOSTS, UNLIMITED_HOSTS
    if reason := why_not():
        tell(f"real-step: no hosts here. {reason}")
        place, link = LOOPBACK, LinkSettings()
    rows = []
    for buckets, size in BUCKETS.items():
        taken = []
        for launch in range(launches):
            tell(f"real-step: {buckets}, {place}, launch {launch + 1} of {launches}")
            take = partial(_take_turns, task, size, rounds, calls)
            taken.append(on_ranks(take, RANKS, tell, link=link, variables=KEEPS_FREED))
        rows += [row for policy in OURS for row in rows_of(taken, policy, buckets, place)]
    return rows


def rows_of(launches: Sequence[Taken], policy: str, buckets: str, place: str) -> list[Row]:
    """Return a row for each clock."""
    rows = []
    for clock in CLOCKS:
        medians = [{who: statistics.median(one) for who, one in taken[clock].items()} for taken in launches]
        words = {who: f"{1e3 * statistics.median(one[who] for one in medians):.1f} ms" for who in medians[0]}
        rows.append(
            Row(
                name=f"{buckets}, {policy}, {place}",
                quantity=f"{clock} added to noop",
                spread=_added(medians, policy, "all-reduce", "all-reduce again"),
                noise=_added(medians, "all-reduce again", "all-reduce"),
                target=None if place != HOSTS else 0.75 if (policy, buckets) == ("fifo", "4 buckets") else 0.6,
                absolute=f"noop {words['noop']}, all-reduce {words['all-reduce']}, this {words[policy]}",
            )
        )
    return rows


def _added(medians: Sequence[Mapping[str, float]], ours: str, *theirs: str) -> Spread:
    """Return what ours adds to noop over what theirs, on average, add to it, over launches."""
    return Spread.of(
        [(one[ours] - one["noop"]) / (statistics.fmean(one[who] for who in theirs) - one["noop"]) for one in medians]
    )


def _take_turns(task: str, size: float, rounds: int, calls: int, tell: Tell) -> Taken:
    """Train every hook's copy on one rank; return the seconds of a step by each clock."""
    turns = {who: partial(_turn, _training_step(task, spec, size), calls) for who, spec in (PEERS | OURS).items()}
    found = turns_of(turns, rounds, warm_up=2)
    return {
        clock: {who: on_slowest([one[number] for one in taken]) for who, taken in found.items()}
        for number, clock in enumerate(CLOCKS)
    }


def _turn(step: Stepper, calls: int) -> list[float]:
    """Take steps together with the other ranks; return the seconds of one by each clock."""
    dist.barrier()  # also waits for what another turn's threads have left to do
    begun = [clock() for clock in CLOCKS.values()]
    for _ in range(calls):
        step()
    return [(clock() - before) / calls for clock, before in zip(CLOCKS.values(), begun, strict=True)]


def _training_step(task: str, spec: str, bucket_mib: float) -> Stepper:
    """Return what takes a step of the task under a hook, on a batch that stays the same."""
    stepper, hook = same_step(task, bucket_mib), Spec.parse(spec)
    commhooks.attach(stepper.ddp, make_hook(hook), policy=policy_of(hook))
    return stepper
