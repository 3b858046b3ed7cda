"""The work of the ranks of `sharded-hosts`: steps in turns with plain FSDP2 and with each hook; and their memory."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commhooks.experiments.cluster import INTERFACE, interface_bytes
from commhooks.experiments.launch import Send, Tell, silent
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.runs import SHARDED, RunSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.training.sharded import ShardedHook
from experiments.studies.bench.memory import Step, growth_in_turns, return_freed_memory
from experiments.studies.reproduce.control_ranks import NewRate
from experiments.studies.turns import on_slowest, rotated, turns_of

_SETTING_SECONDS = 1.0  # for the process that made the hosts to set the rate of their links: much longer than it takes


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


@dataclass(frozen=True)
class Asked:
    """The work of a world of ranks: turns at each of the rates, in bits per second; None: no limit."""

    settings: Settings
    rates: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A hook's turns at one rate; lists have a value for each."""

    seconds: list[float]  # of the step, on the rank where it took longest
    moved: list[float]  # bytes that the rank counted, mean over the ranks
    carried: list[float]  # bytes that the host's interface sent, mean over the ranks


def run_turns(rank: int, ranks: int, asked: Asked, send: Send) -> None:
    """Take turns of every hook at every rate; rank 0 sends each rate with `Turns` by hook."""
    torch.set_num_threads(1)
    settings, tell = asked.settings, send if rank == 0 else silent
    has_hosts = settings.kind == "hosts"
    workers: dict[str, _Worker] = {}
    for rate, bits in asked.rates.items():
        if has_hosts and bits is not None:
            tell(NewRate(bits))
            time.sleep(_SETTING_SECONDS)
        if not has_hosts or not workers:
            _close(workers)
            link = LinkSettings(kind="hosts") if has_hosts else LinkSettings(bits_per_second=bits)
            workers = {hook: _Worker(settings.task, hook, ranks, link) for hook in settings.hooks}
        tell(f"turns at {rate}")
        taken = turns_of(workers, settings.turns, warm_up=1, order=rotated, tell=tell)
        tell((rate, {hook: _turns(turns) for hook, turns in taken.items()}))
    _close(workers)


def _turns(turns: list[list[float]]) -> Turns:
    seconds, moved, carried = (list(values) for values in zip(*turns, strict=True))
    sent = torch.tensor([moved, carried], dtype=torch.float64)
    dist.all_reduce(sent)
    both = (sent / dist.get_world_size()).tolist()
    return Turns(seconds=on_slowest(seconds), moved=both[0], carried=both[1])


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
    worker = _Worker(settings.heavy, hook, dist.get_world_size(), LinkSettings())
    step = partial(_weighed_step, worker, stated, hook)
    weakref.finalize(step, worker.registered.close)
    return step


def _weighed_step(worker: _Worker, stated: dict[str, tuple[int, int]], hook: str) -> None:
    worker()
    stated[hook] = worker.registered.memory()


def _close(workers: dict[str, _Worker]) -> None:
    while workers:
        workers.popitem()[1].registered.close()


class _Worker:
    """A sharded model under one hook, whose steps are timed."""

    def __init__(self, task: str, hook: str, ranks: int, link: LinkSettings) -> None:
        self._task = load_task(Spec.parse(task, "task"))
        settings = RunSettings(task=self._task.spec, hook=Spec.parse(hook), ranks=ranks, link=link, ddp=SHARDED)
        self.registered = ShardedHook(settings, self._task, 1.0)
        self._batch = self._task.batch(0, dist.get_rank(), ranks)
        self._has_hosts = link.kind == "hosts"

    def __call__(self) -> list[float]:
        """Take a step that begins on all ranks together; return its seconds, and the bytes counted and carried."""
        dist.barrier()
        moved, carried = self.registered.counted().moved_bytes, self._carried()
        began = time.perf_counter()
        self._task.loss(self.registered.ddp, self._batch).backward()
        self.registered.optimizer.step()
        self.registered.optimizer.zero_grad()
        seconds = time.perf_counter() - began
        dist.barrier()  # what the other ranks still send is this step's
        return [seconds, float(self.registered.counted().moved_bytes - moved), float(self._carried() - carried)]

    def _carried(self) -> int:
        return interface_bytes(INTERFACE)[0] if self._has_hosts else 0
