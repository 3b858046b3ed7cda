"""Hooks whose only state is a process group: how they find their engine, and how any hook returns its result."""

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch._compile import _disable_dynamo

from commhooks.engine.engine import Engine
from commhooks.errors import CommHooksError
from commhooks.hooks.facts import check_bucket
from commhooks.language.compressor import Compressor
from commhooks.scheduling.ledger import Statistics
from commhooks.scheduling.line import ProcessGroupLine

_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Compressor, Engine]] = weakref.WeakKeyDictionary()
"""One engine for each process group and compressor.

These engines keep nothing between steps, so models can share one. The keys are weak: destroying a group drops its
engines, and a new group gets new ones even if it has the same name.
"""


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the process group, or the default one if None; raise `CommHooksError` if there is none yet."""
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise CommHooksError("there is no process group; call torch.distributed.init_process_group first.")
    if not isinstance(group, dist.ProcessGroup):
        raise CommHooksError(
            f"expected a process group that this rank belongs to, or None for the default one (got {group!r})."
        )
    return group


@_disable_dynamo  # a compiled training step, with its backward pass, would trace the engine
def run_stateless(
    compressor: Compressor, process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    """Average a bucket with a stateless compressor, on the engine of its process group."""
    check_bucket(bucket)
    group = group_or_default(process_group)
    engines = _engines.setdefault(group, {})
    if compressor not in engines:
        line = ProcessGroupLine(group, label=repr(compressor))
        engines[compressor] = Engine(compressor, line, by_parameter=False)
    return deliver(engines[compressor].run(bucket), bucket)


def hook_statistics(process_group: dist.ProcessGroup | None = None) -> dict[str, Statistics]:
    """Return this rank's totals of the stateless hooks on a process group, by compressor.

    All models that use such a hook on the group are counted together. A hook with state, or an attachment, has its own
    `statistics()`.
    """
    engines = _engines.get(group_or_default(process_group), {})
    return {repr(compressor): engine.statistics() for compressor, engine in engines.items()}


def deliver(future: torch.futures.Future[Tensor], bucket: object) -> torch.futures.Future[Tensor]:
    """Return a future whose failure reaches the DDP that passed in `bucket`.

    PyTorch's reducer reads an exception set on a future as if it were a value, and crashes; it recognises an error only
    if a callback of the future raises one.
    """
    return future.then(_value_of) if isinstance(bucket, GradBucket) else future


def _value_of(future: torch.futures.Future[Tensor]) -> Tensor:
    return future.value()
