"""Parameters that an iteration does not use.

A parameter that this rank does not use gets no gradient, so it must count as ready from the start; otherwise its bucket
would wait forever. Such parameters are found by searching the graph after every forward pass
(``find_unused_parameters``), or learned in the first iteration (``static_graph``). A parameter that *no* rank uses
keeps its gradient, if any, while all others get a mean: to identify these, an all-reduce counts the ranks that used
each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from ddp_core.collectives import all_reduce, finish
from ddp_core.graph import unreachable


class Usage:
    """The number of ranks that used each parameter, counted by an all-reduce."""

    def __init__(self, used: Sequence[int], group: dist.ProcessGroup, device: torch.device):
        counts = torch.tensor(used, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self.counts = counts.to(device, non_blocking=True)  # in the backward pass, where the host should not wait
        self.work = all_reduce(group, self.counts)

    def unused(self) -> set[int]:
        """Wait, and return the parameters that no rank used."""
        finish(self.work)
        return {index for index, count in enumerate(self.counts.tolist()) if count == 0}


class UnusedParameters:
    """The parameters that this rank does not use (``here``), or that no rank uses (``everywhere``)."""

    def __init__(self, parameters: Sequence[Parameter], accumulators: Mapping[Node, int], searches: bool):
        self.parameters = parameters
        self.accumulators = accumulators  # the parameters' nodes in the graph
        self.searches = searches  # after every forward pass
        self.static = False  # never searches: the graph is the same in every iteration
        self.tracked = searches  # one of the two; otherwise every parameter is assumed to be used
        self.reset()

    def reset(self) -> None:
        """Forget the iterations so far."""
        self.learned = False  # static graph: the first iteration is over
        self.firings = [0] * len(self.parameters)  # static graph: how many times each node fires in an iteration
        self.used = [0] * len(self.parameters)  # 1 for those that this rank used
        self.here: list[int] = []  # these count as ready without firing
        self.everywhere: set[int] = set()
        self.passed_over: set[int] = set()  # by the latest reduction: expected to be used, and without a gradient
        self.constant = True  # every search found the same as the one before

    def become_static(self) -> None:
        """Learn the unused parameters in the first iteration, and never search."""
        self.static, self.searches, self.tracked = True, False, True

    @property
    def learning(self) -> bool:
        """True in a static graph's first iteration: firings are counted, and everything is reduced at the end."""
        return self.static and not self.learned

    def search(self, outputs: Iterable[Tensor], first: bool) -> None:
        """Search for parameters that no tensor in ``outputs`` depends on; ``first``: there was no search before."""
        with torch.autograd.profiler.record_function("search_unused_parameters"):
            here = unreachable(outputs, self.accumulators)
        self.constant &= first or here == self.here
        self.here = here

    def learn(self) -> None:
        """Record the parameters whose nodes did not fire, after the first backward pass of a static graph."""
        self.here = [index for index, firings in enumerate(self.firings) if firings == 0]

    def end_iteration(self) -> None:
        """Record the parameters that the reduction passed over, and expect every other one to be used again."""
        if self.learning:
            self.learned, self.passed_over = True, set(self.here)
        elif self.searches:
            self.passed_over = {index for index, used in enumerate(self.used) if not used}.difference(self.here)
            self.used = [0] * len(self.parameters)

    def untouched(self, indices: Sequence[int], usage: Usage | None) -> set[int]:
        """Return the parameters that no rank used, which keep their gradients; empty if this one used all ``indices``.

        Reads ``usage`` only if necessary: on a GPU, that is a round trip. None: the earlier answer still holds.
        """
        if not self.tracked or all(self.used[index] for index in indices):
            return set()
        if usage is not None:
            self.everywhere = usage.unused()
        return self.everywhere
