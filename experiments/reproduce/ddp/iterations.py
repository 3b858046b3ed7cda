"""What figures 9 and 10 share: ranks that train on a link, and iterations that are timed in turns.

A rank gets what one core computes, although several may share a core: time is dilated (`dilation`), as with the
setting `compute` of runs. With four ranks on each core compute takes four times as long, so the link is slowed down by
four as well, and every reported time is divided by four.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...cluster import Cluster
from ...launch import RankFunction, run_world
from ...links.link import LinkSettings, Wire
from ...links.linked_group import LinkedGroup
from ...machine import cores
from ...specs import Spec
from ...tasks import load_task
from ...training.registration import wrap_in_ddp
from ..notes import Notes

_SILENCE = 180.0  # seconds without a word from the ranks, after which they are stuck


def dilation(ranks: int) -> float:
    """Return how many seconds here stand for one, if each rank is to have what one core computes."""
    return max(1.0, ranks / cores())


def measure_in_world(function: RankFunction, ranks: int, argument: object, link: LinkSettings, notes: Notes) -> Any:
    """Call the function in ranks on links of this kind and rate, and return what rank 0 sends in the end.

    Texts that are sent before are progress.
    """
    heard = _Heard(notes)
    with ExitStack() as stack:
        cluster = None
        if link.kind == "hosts":
            cluster = stack.enter_context(Cluster.create(ranks, up=link.bits_per_second, down=link.bits_per_second))
        run_world(function, ranks, argument, heard, timeout=_SILENCE, cluster=cluster)
    return heard.result


@dataclass
class _Heard:
    """What the ranks have said."""

    notes: Notes
    result: Any = None

    def __call__(self, message: object) -> None:
        """Pass on progress, and keep the result."""
        if isinstance(message, str):
            self.notes.tell(message)
        else:
            self.result = message


class Replica:
    """One rank's model, in a DDP without a hook whose collectives pass a link."""

    def __init__(
        self, task: Spec, ddp: str, bucket_cap_mb: float | None, link: LinkSettings, group: dist.ProcessGroup
    ) -> None:
        self.task = load_task(task)
        self.parameters = sum(p.numel() for p in self.task.model.parameters())
        self._linked = LinkedGroup(group, Wire(link)) if link.kind == "emulated" else None
        self.ddp: Any = wrap_in_ddp(
            self.task.model, ddp, bucket_cap_mb, group if self._linked is None else self._linked
        )
        self._batch = self.task.batch(0, dist.get_rank(), dist.get_world_size())
        self._optimizer = self.task.optimizer()

    def accumulate(self, iterations: int) -> None:
        """Run forward and backward passes that do not synchronize the gradients."""
        with self.ddp.no_sync():
            for _ in range(iterations):
                self._backward()

    def step(self) -> None:
        """Run a forward and a backward pass that synchronizes, and the optimizer's step."""
        self._backward()
        self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients that were accumulated."""
        self._optimizer.zero_grad()

    def close(self) -> None:
        """Remove the DDP, which must go before its process group does."""
        del self.ddp
        if self._linked is not None:
            self._linked.close()

    def _backward(self) -> None:
        self.task.loss(self.ddp, self._batch).backward()


def timed(action: Callable[[], object]) -> list[float]:
    """Return the seconds that the action takes on every rank; all begin together."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    own = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [seconds.item() for seconds in found]
