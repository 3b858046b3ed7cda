"""The work of the ranks of `hsdp`: steps of a model on two sites, in turns with FSDP2's HSDP and with compressors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks.experiments.hooks import make_hook
from commhooks.experiments.launch import Send, silent
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.timing.sharded import blocks_of
from experiments.studies.reproduce.worker import Worker, ask_for, over_ranks
from experiments.studies.turns import drawn, turns_of

WITHIN, HSDP, EVERY = "within sites only", "HSDP", "HSDP, every batch"
"""Contenders without a compressor: FSDP2 on a site alone, plain HSDP, and HSDP that averages after every batch."""
_LARGEST_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the measurement."""

    limited: bool = True  # False: a trial of the code, without sites whose link could change
    ranks_per_site: int = 2
    rates: tuple[str, ...] = ("1Gbit/s", "100Mbit/s")
    task: str = "gpt:size=base"
    hooks: tuple[str, ...] = ("all-reduce", "fp16", "int8", "powersgd:rank=4")
    batches: tuple[int, ...] = (1, 4)  # of a step, whose gradients are accumulated
    turns: int = 9  # at each rate, one step each
    models: tuple[str, ...] = ("70M (Pythia)", "1.1B (TinyLlama)", "6.7B (Llama 2)")  # of the arithmetic


@dataclass(frozen=True)
class Asked:
    """The work of a world of ranks: turns at each of the rates, in bits per second."""

    settings: Settings
    batches: int
    rates: Mapping[str, float]


def run_turns(rank: int, ranks: int, asked: Asked, send: Send) -> None:
    """Take turns of every contender at every rate; rank 0 sends each rate with the turns by contender.

    Losses are those before the step, means over its batches and all ranks; bytes are those of a site's ranks together
    that go between sites (`moved`, 0 without a compressor), and of its interface (`carried`), means over the sites.
    """
    torch.set_num_threads(1)
    settings, tell = asked.settings, send if rank == 0 else silent
    names = [WITHIN, HSDP, *([EVERY] if asked.batches > 1 else []), *settings.hooks]
    workers = {name: _Worker(settings, name, asked.batches) for name in names}
    for rate, bits in asked.rates.items():
        if settings.limited:
            ask_for(bits, tell)
        tell(f"turns at {rate}")
        turns = {name: worker.turn for name, worker in workers.items()}
        taken = turns_of(turns, settings.turns, warm_up=1, order=drawn, tell=tell)
        tell((rate, {name: over_ranks(turns) for name, turns in taken.items()}))
    for worker in workers.values():
        worker.close()


class _Worker(Worker):
    """A model of its own under one contender; a turn is a step."""

    def __init__(self, settings: Settings, name: str, batches: int) -> None:
        sites = dist.get_world_size() // settings.ranks_per_site
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (sites, settings.ranks_per_site), mesh_dim_names=names)
        self._task = load_task(Spec.parse(settings.task, "task"))
        self._model: Any = self._task.model
        for module in (*blocks_of(self._model), self._model):
            fully_shard(module, mesh=mesh if name in {HSDP, EVERY} else mesh["shard"])
        self._optimizer = self._task.optimizer()
        self._attachment: commhooks.Handle[Any] | None = None
        if name in settings.hooks:
            made, group = make_hook(Spec.parse(name)), mesh["replicate"].get_group()
            self._attachment = commhooks.attach_replicas(self._model, made, process_group=group)
        self._averages_every = name == EVERY
        self._batches, self._taken, self._ranks_per_site = batches, 0, settings.ranks_per_site
        self.has_hosts = settings.limited

    def run(self) -> dict[str, float]:
        """Take a step; return the loss before it."""
        loss = 0.0
        for number in range(self._batches):
            self._model.set_requires_all_reduce(self._averages_every or number == self._batches - 1)
            batch = self._task.batch(self._taken, dist.get_rank(), dist.get_world_size())
            found = self._task.loss(self._model, batch) / self._batches
            found.backward()
            loss += found.item()
            self._taken += 1
        nn.utils.clip_grad_norm_(self._model.parameters(), _LARGEST_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"losses": loss}

    def moved(self) -> float:
        """Return the bytes that a site's ranks together have counted, if all sent as many as this one."""
        if self._attachment is None:
            return 0.0
        return float(self._ranks_per_site * self._attachment.statistics().moved_bytes)

    def close(self) -> None:
        """Detach the compressor."""
        if self._attachment is not None:
            self._attachment.close()
