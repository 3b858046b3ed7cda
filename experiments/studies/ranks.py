"""What studies run on ranks: a function with a result, and a step that only sends gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from commhooks.experiments.cluster import hosts_on
from commhooks.experiments.launch import Send, Tell, environment, run_world, silent
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import LoadedTask, load_task
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.experiments.training.stepper import Stepper

T = TypeVar("T")

_TIMEOUT_SECONDS = 120.0  # without a message


def on_ranks(
    function: Callable[[Tell], T],
    ranks: int,
    tell: Tell,
    *,
    link: LinkSettings | None = None,
    variables: Mapping[str, str] | None = None,
) -> T:
    """Call `function(tell)` on new ranks, each with one thread, and return rank 0's result.

    If the link is of kind "hosts", the ranks run on hosts with its rate; see `run_world`.

    Args:
        function: Picklable.
        ranks: The number of processes.
        tell: Called here with each text that rank 0 tells, as progress.
        link: The link between the ranks; None: the loopback.
        variables: Variables for the ranks' environment.

    Raises:
        WorldError: A rank raised an error or died, or all fell silent.

    """
    found: list[tuple[T]] = []
    hear = lambda message: tell(message) if isinstance(message, str) else found.append(message)
    with environment(variables or {}), hosts_on(link or LinkSettings(), ranks) as cluster:
        run_world(_call, ranks, function, hear, timeout=_TIMEOUT_SECONDS, cluster=cluster)
    ((value,),) = found
    return value


def _call(rank: int, ranks: int, function: Callable[[Tell], object], send: Send) -> None:
    torch.set_num_threads(1)
    value = function(send if rank == 0 else silent)
    if rank == 0:
        send((value,))


def same_step(
    task: str, ddp: str = "core", bucket_mib: float | None = None, group: dist.ProcessGroup | None = None
) -> Stepper:
    """Return the stepper of a task whose DDP sends only gradients, and whose steps are all on one batch.

    Args:
        task: A built-in task, as on the command line.
        ddp: "core": ddp_core's DistributedDataParallel; "torch": PyTorch's.
        bucket_mib: The bucket size in MiB; None: the DDP's default.
        group: The process group whose ranks train; None: the default group.

    """
    loaded = without_broadcasts(task)
    return Stepper(loaded, wrap_in_ddp(loaded.model, ddp, bucket_mib, group), same_batch=True)


def without_broadcasts(task: str) -> LoadedTask:
    """Return a task whose model's buffers are not broadcast before each forward pass: a DDP sends only gradients."""
    loaded = load_task(Spec.parse(task, "task"))
    names = [name for name, _ in loaded.model.named_buffers()]
    loaded.model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]  # 'expression has type "list[str]"'
    return loaded
