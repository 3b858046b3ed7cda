"""What figures 9 and 10 share: models that train on a link with or without synchronizing, and how they are drawn.

Each rank has what one core computes, even if several share a core: time is dilated
(`experiments.machine.dilation`), as with the setting `compute` of runs. With four ranks on each core, compute takes
four times as long, so the link is slowed down by four as well, and every reported time is divided by four.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from matplotlib.axes import Axes

from experiments.launch import RankFunction, run_on_link
from experiments.links.link import LinkSettings, Wire
from experiments.links.linked_group import LinkedGroup
from experiments.results.summary import Spread
from experiments.training.registration import wrap_in_ddp

from ..notes import Notes
from .turns import load_without_broadcasts

_WARM_UP = 2  # iterations that synchronize, before the first turn: DDPs rebuild their buckets after the first one


def measure_in_world(function: RankFunction, ranks: int, argument: object, link: LinkSettings, notes: Notes) -> Any:
    """Call the function in new ranks on such links, and return what rank 0 sends in the end."""
    return run_on_link(function, ranks, argument, link, notes.tell)[-1]


class Replica:
    """One rank's model, in a DDP whose collectives pass a link."""

    def __init__(
        self, task: str, ddp: str, bucket_mib: float | None, link: LinkSettings, group: dist.ProcessGroup
    ) -> None:
        self._task = load_without_broadcasts(task)
        model = self._task.model
        self.parameters = sum(p.numel() for p in model.parameters())
        self._linked = LinkedGroup(group, Wire(link)) if link.kind == "emulated" else None
        self.ddp: Any = wrap_in_ddp(model, ddp, bucket_mib, group if self._linked is None else self._linked)
        self._batch = self._task.batch(0, dist.get_rank(), dist.get_world_size())
        self._optimizer = self._task.optimizer()

    def warm_up(self) -> None:
        """Run the iterations that are not timed."""
        for _ in range(_WARM_UP):
            self.step()

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
        self._task.loss(self.ddp, self._batch).backward()


def draw_quartiles(
    axes: Axes, places: Sequence[float], seconds: Sequence[Sequence[float]], *, colour: str, label: str
) -> None:
    """Draw the median of each measurement in milliseconds, with a bar from quartile to quartile."""
    spreads = [Spread.of(each) for each in seconds]
    medians = [1e3 * each.median for each in spreads]
    bars = [[1e3 * (each.median - each.low) for each in spreads], [1e3 * (each.high - each.median) for each in spreads]]
    axes.errorbar(places, medians, yerr=bars, color=colour, marker="o", markersize=4, capsize=3, label=label)


def label_axes(axes: Axes, title: str, label: str, places: Sequence[int]) -> None:
    """Give axes a title, milliseconds from 0 on, and these places on a logarithmic horizontal axis."""
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.set_xlabel(label)
    axes.set_ylim(bottom=0)
