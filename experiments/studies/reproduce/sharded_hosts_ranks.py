"""The work of the ranks of `sharded-hosts`: steps in turns with plain FSDP2 and with each hook; and their memory."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from commhooks.experiments.launch import Send, Tell
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.runs import SHARDED, RunSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.training.sharded import ShardedHook
from experiments.studies.bench.memory import Step, growth_in_turns, return_freed_memory
from experiments.studies.ranks import UNLIMITED_HOSTS
from experiments.studies.reproduce.worker import Worker, ask_for, over_ranks
from experiments.studies.turns import rotated, turns_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the measurement."""

    kind: str = "hosts"
    ranks: tuple[int, ...] = (2, 4)
    rates: tuple[str, ...] = ("1Gbit/s", "100Mbit/s")
    task: str = "gpt:size=medium"
    hooks: tuple[str, ...] = (
        "torch.none",
        "all-reduce",
        "bf16",
        "int8",
        "int4",
        "all-reduce:gather=int8",
        "int8:gather=int8",
    )
    turns: int = 4  # at each rate, one step each
    heavy: str = "gpt:size=base"  # whose memory is measured


def run_turns(settings: Settings, rates: Mapping[str, float | None], send: Send) -> dict[str, Any]:
    """Return the turns of every hook at each of the rates, which are in bits per second (None: no limit)."""
    found: dict[str, Any] = {}
    has_hosts = settings.kind == "hosts"
    workers: dict[str, _Worker] = {}
    for rate, bits in rates.items():
        if has_hosts and bits is not None:
            ask_for(bits, send)
        if not has_hosts or not workers:
            _close(workers)
            link = UNLIMITED_HOSTS if has_hosts else LinkSettings(bits_per_second=bits)
            workers = {hook: _Worker(settings.task, hook, link) for hook in settings.hooks}
        send(f"turns at {rate}")
        turns = {hook: worker.turn for hook, worker in workers.items()}
        taken = turns_of(turns, settings.turns, warm_up=1, order=rotated, tell=send)
        found[rate] = {hook: over_ranks(turns) for hook, turns in taken.items()}
    _close(workers)
    return found


def weigh(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Return what each hook states to use, in bytes, and by how much its steps raise the memory of the process."""
    return_freed_memory()
    stated: dict[str, tuple[int, int]] = {}
    grown = growth_in_turns({hook: partial(_weighed, settings, hook, stated) for hook in settings.hooks}, 2)
    return {
        hook: {"stated": stated[hook][0], "residuals": stated[hook][1], "grown": min(values)}
        for hook, values in grown.items()
    }


def _weighed(settings: Settings, hook: str, stated: dict[str, tuple[int, int]]) -> Step:
    """Return what takes a step of a new model, and notes what its hook states to use."""
    worker = _Worker(settings.heavy, hook, LinkSettings())
    step = partial(_weighed_step, worker, stated, hook)
    weakref.finalize(step, worker.close)
    return step


def _weighed_step(worker: _Worker, stated: dict[str, tuple[int, int]], hook: str) -> None:
    worker.turn()
    stated[hook] = worker.registered.memory()


def _close(workers: dict[str, _Worker]) -> None:
    while workers:
        workers.popitem()[1].close()


class _Worker(Worker):
    """A sharded model under one hook; a turn is a step."""

    def __init__(self, task: str, hook: str, link: LinkSettings) -> None:
        self._task, ranks = load_task(Spec.parse(task, "task")), dist.get_world_size()
        settings = RunSettings(task=self._task.spec, hook=Spec.parse(hook), ranks=ranks, link=link, ddp=SHARDED)
        self.registered = ShardedHook(settings, self._task, 1.0)
        self._batch = self._task.batch(0, dist.get_rank(), ranks)
        self.has_hosts = link.kind == "hosts"

    def run(self) -> dict[str, float]:
        """Take a step."""
        self._task.loss(self.registered.ddp, self._batch).backward()
        self.registered.optimizer.step()
        self.registered.optimizer.zero_grad()
        return {}

    def moved(self) -> float:
        """Return the bytes that the rank has counted."""
        return float(self.registered.counted().moved_bytes)

    def close(self) -> None:
        """Take the hook away."""
        self.registered.close()
