"""What PowerSGD adds to a whole training step, over what a plain all-reduce adds: a GPT of 4.08 million parameters.

Each hook trains a copy of its own, in turns on 2 ranks. A step with `noop` is compute alone, so the ratio is
(PowerSGD - noop) / (all-reduce - noop), round by round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import commhooks
from experiments.cluster import why_not
from experiments.hooks import make_hook, policy_of
from experiments.launch import Send
from experiments.links.link import LinkSettings
from experiments.results.summary import Spread
from experiments.specs import Spec
from experiments.tasks import LoadedTask
from experiments.training.registration import wrap_in_ddp

from ..reproduce.ddp.turns import load_without_broadcasts
from .rows import Row
from .timing import Seconds, Tell, in_turns, on_ranks

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


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the ranks are told."""

    task: str
    rounds: int
    calls: int


def measure(quick: bool, tell: Tell, place: str | None = None) -> list[Row]:
    """Return the rows of both places, or of one; without the hosts' if this machine cannot have any."""
    asked = _Asked(
        task="gpt:size=tiny" if quick else "gpt:size=base", rounds=3 if quick else 20, calls=1 if quick else 3
    )
    rows = []
    for where in [place] if place else [HOSTS, LOOPBACK]:
        if where == HOSTS and (reason := why_not()):
            tell(f"real-step: no hosts here. {reason}")
            continue
        tell(f"real-step: {len(PEERS) + len(OURS)} copies of {asked.task} in turns, {where}")
        link = LinkSettings(kind="hosts") if where == HOSTS else LinkSettings()
        (seconds,) = on_ranks(_take_turns, RANKS, asked, tell, link=link, keeps_freed=True)
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


def _take_turns(rank: int, ranks: int, asked: _Asked, send: Send) -> None:
    """Train every hook's copy on one rank; rank 0 sends the seconds of a step."""
    torch.set_num_threads(1)
    steps = {name: training_step(asked.task, spec, rank, ranks) for name, spec in (PEERS | OURS).items()}
    seconds = in_turns(steps, asked.rounds, calls=asked.calls)
    if rank == 0:
        send(seconds)


def training_step(task: str, spec: str, rank: int, ranks: int) -> Callable[[], None]:
    """Return a function that takes a step of the task under a hook, on a batch that stays the same."""
    loaded = load_without_broadcasts(task)
    ddp = wrap_in_ddp(loaded.model, "core", None)
    hook = Spec.parse(spec)
    commhooks.attach(ddp, make_hook(hook), policy=policy_of(hook))
    return partial(_step, loaded, ddp, loaded.optimizer(), loaded.batch(0, rank, ranks))


def _step(task: LoadedTask, ddp: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: object) -> None:
    optimizer.zero_grad()
    task.loss(ddp, batch).backward()
    optimizer.step()
