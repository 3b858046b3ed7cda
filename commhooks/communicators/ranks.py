"""Ranks that do something together, such as saving a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from commhooks.errors import CheckpointError, CommHooksError

Value = TypeVar("Value")


class Ranks:
    """The ranks of a process group (None: the default one): a failure on one of them raises `error` on all."""

    def __init__(self, group: dist.ProcessGroup | None, error: type[CommHooksError] = CheckpointError) -> None:
        self._error = error
        self.group: dist.ProcessGroup | None = (
            group if group is not None or not dist.is_initialized() else dist.group.WORLD
        )
        self.rank: int = 0 if self.group is None else dist.get_rank(self.group)
        self.world_size: int = 1 if self.group is None else dist.get_world_size(self.group)

    def gather(self, what: str, act: Callable[[], Value]) -> list[Any]:
        """Call `act` on every rank, and return all results by rank; if it fails on one, raise the error on all.

        `what` is the purpose that the error names: "could not ...".
        """
        done: tuple[Any, str | None]
        error: Exception | None = None
        try:
            done = act(), None
        except Exception as failure:
            error, done = failure, (None, f"{type(failure).__name__}: {failure}")
        told = [done]
        if self.group is not None:
            told = [done] * self.world_size
            dist.all_gather_object(told, done, group=self.group)
        failed = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text is not None]
        if failed:
            raise self._error(f"could not {what}. " + " ".join(failed)) from error
        return [value for value, _ in told]

    def each(self, what: str, act: Callable[[], Value]) -> Value:
        """Call `act` on every rank, and return this rank's result, which is not sent; failures raise as in `gather`."""
        kept: list[Value] = []
        self.gather(what, lambda: kept.append(act()))
        return kept[0]

    def gather_to(self, rank: int, value: Value) -> list[Value] | None:
        """Return every rank's value, by rank, on `rank`; return None elsewhere."""
        if self.group is None:
            return [value]
        told = [value] * self.world_size if self.rank == rank else None
        dist.gather_object(value, told, group=self.group, group_dst=rank)
        return told

    def first(self, what: str, act: Callable[[], Any]) -> Any:
        """Call `act` on rank 0 only, and return its result on every rank; failures raise as in `gather`."""
        return self.gather(what, lambda: act() if self.rank == 0 else None)[0]
