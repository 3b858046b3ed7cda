"""The common base of attachments to a model's FSDP modules: handles on one line that watch optimizers."""

from __future__ import annotations

import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from commhooks.hooks.grouped import Grouped, One
from commhooks.hooks.watching import ReductionsGuard, Watch, optimizer_of
from commhooks.scheduling.ledger import Statistics, total
from commhooks.scheduling.line import ProcessGroupLine


class ModulesAttachment(Grouped[One]):
    """Compressors of FSDP modules, by label, on one line."""

    _line: ProcessGroupLine
    _watches: list[Watch]
    _seam: str
    """The part of FSDP2 that runs the compressor, in words for errors."""

    @property
    @abstractmethod
    def is_attached(self) -> bool:
        """True while the model's gradients go through this compressor: until `detach`, or until the model is gone."""

    @abstractmethod
    def detach(self) -> None:
        """Restore FSDP2's own communication in the modules. A second call does nothing.

        Every rank must detach between the same two steps.
        """

    @abstractmethod
    def _shards(self, label: str) -> Mapping[Tensor, str]:
        """Return the parameters whose gradients a handle's compressor averages, with their names."""

    @property
    def steps(self) -> int:
        """The number of rounds since attaching, the most of any module.

        A backward pass that synchronises has one round, or one for each call of a module that is called several times
        in it.
        """
        return max(one._made_engine().step for one in self.values())

    def statistics(self) -> Statistics:
        """Return this rank's totals over all modules; its steps are the most of any module."""
        of_modules = [one.statistics() for one in self.values()]
        return dataclasses.replace(total(of_modules), steps=max(one.steps for one in of_modules))

    @property
    def rank_and_world_size(self) -> tuple[int, int]:
        """The rank of this process and the number of ranks, among those that average together."""
        return self._line.rank, self._line.world_size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group whose ranks average together; None once it has been destroyed."""
        return self._line.process_group

    def watch(self, *optimizers: object) -> None:
        """Raise `NotAveragedError` whenever one of these takes a step on gradients that bypassed the compressor.

        Pass the optimizers of the model, or a framework's wrappers around them. See `Attachment.watch`. With one rank,
        nothing is watched.
        """
        if self._line.world_size == 1:
            return
        shards = {label: self._shards(label) for label in self}
        found = [optimizer_of("watch", list(itertools.chain(*shards.values())), one) for one in optimizers]
        for optimizer, label in itertools.product(found, self):
            self._watch(optimizer, label, shards[label])

    def _watch(self, optimizer: Optimizer, label: str, shards: Mapping[Tensor, str]) -> None:
        trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if not trained.isdisjoint(shards.keys()):
            engine = self[label]._made_engine()
            advice = (
                "the last backward pass before the step did not synchronise; run it with "
                f"set_requires_gradient_sync(True), and set no other {self._seam}"
            )
            named = [(name, shard) for shard, name in shards.items()]
            guard = ReductionsGuard(named, label, engine, advice, lambda: engine.step)
            self._watches.append(Watch(optimizer, guard, shards.keys(), engine))

    def _end_watching(self) -> None:
        while self._watches:  # they hold parameters
            self._watches.pop().remove()

    def close(self) -> None:
        """Detach."""
        self.detach()
