"""The time that PowerSGD adds to a whole training step, over a plain all-reduce's: a GPT of 4.08 million parameters.

Each hook trains a copy of its own, in turns on 2 ranks. A step with `noop` is compute alone, so the ratio is
(PowerSGD - noop) / (all-reduce - noop), round by round.
"""

from __future__ import annotations

import statistics
from functools import partial

import commhooks
from experiments.cluster import why_not
from experiments.hooks import make_hook, policy_of
from experiments.launch import Tell, on_ranks
from experiments.links.link import LinkSettings
from experiments.results.summary import Spread
from experiments.specs import Spec
from experiments.training.stepper import Stepper, same_step
from experiments.turns import in_turns

from .memory import KEEPS_FREED
from .rows import Row, Seconds

SENTENCE = (
    "A training step of a GPT of 4.08 million parameters on 2 ranks of one thread each, by `ddp_core`: what PowerSGD "
    "adds to a step that exchanges nothing (`noop`), over what a plain all-reduce adds to it. Noise: the all-reduce "
    "against itself, by another copy of the model. The target is for two hosts (network namespaces) whose link has no "
    "limit; the loopback is shown beside them."
)
TARGET = 0.6
RANKS = 2
PEERS = {"noop": "noop", "all-reduce": "all-reduce", "all-reduce again": "all-reduce"}
OURS = {
    "PowerSGD, rank 4": "powersgd:rank=4",
    "PowerSGD, rank 1": "powersgd:rank=1",
    "PowerSGD, rank 4, fused": "powersgd:rank=4,policy=fused",
}
HOSTS, LOOPBACK = "two hosts", "loopback"


def measure(quick: bool, tell: Tell, place: str | None = None) -> list[Row]:
    """Return the rows of both places, or of one; without the hosts' if this machine cannot have any."""
    task, rounds, calls = ("gpt:size=tiny", 3, 1) if quick else ("gpt:size=base", 20, 3)
    rows = []
    for where in [place] if place else [HOSTS, LOOPBACK]:
        if where == HOSTS and (reason := why_not()):
            tell(f"real-step: no hosts here. {reason}")
            continue
        tell(f"real-step: {len(PEERS) + len(OURS)} copies of {task} in turns, {where}")
        link = LinkSettings(kind="hosts") if where == HOSTS else LinkSettings()
        take = partial(_take_turns, task, rounds, calls)
        seconds = on_ranks(take, RANKS, tell, link=link, variables=KEEPS_FREED)
        rows += rows_of(seconds, where)
    return rows


def rows_of(seconds: Seconds, place: str) -> list[Row]:
    """Return a row for each of our hooks."""
    noise = _added(seconds, "all-reduce again", "all-reduce")
    milliseconds = {name: f"{1e3 * statistics.median(taken):.1f} ms" for name, taken in seconds.items()}
    return [
        Row(
            name=f"{name}, {place}",
            quantity="time added to noop",
            spread=_added(seconds, name, "all-reduce", "all-reduce again"),
            noise=noise,
            target=TARGET if place == HOSTS and "fused" not in name else None,
            absolute=f"noop {milliseconds['noop']}, all-reduce {milliseconds['all-reduce']}, this {milliseconds[name]}",
        )
        for name in OURS
    ]


def _added(seconds: Seconds, ours: str, *theirs: str) -> Spread:
    """Return what ours adds to noop over what theirs, on average, add to it, in each round."""
    noop = seconds["noop"]
    added = [
        (mine - nothing) / (statistics.fmean(others) - nothing)
        for nothing, mine, *others in zip(noop, seconds[ours], *(seconds[one] for one in theirs), strict=True)
    ]
    return Spread.of(added)


def _take_turns(task: str, rounds: int, calls: int, tell: Tell) -> Seconds:
    """Train every hook's copy on one rank; return the seconds of a step."""
    steps = {name: training_step(task, spec) for name, spec in (PEERS | OURS).items()}
    return in_turns(steps, rounds, calls=calls)


def training_step(task: str, spec: str) -> Stepper:
    """Return what takes a step of the task under a hook, on a batch that stays the same."""
    stepper, hook = same_step(task), Spec.parse(spec)
    commhooks.attach(stepper.ddp, make_hook(hook), policy=policy_of(hook))
    return stepper
