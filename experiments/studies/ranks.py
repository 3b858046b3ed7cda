"""What studies run on ranks: a function with a result, and a step that only sends gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from commhooks.experiments.cluster import hosts_on
from commhooks.experiments.launch import Send, Tell, environment, run_world, silent
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.experiments.training.stepper import Stepper

T = TypeVar("T")

UNLIMITED_HOSTS = LinkSettings(kind="hosts")
"""Each rank on a host of its own, whose link has no limit until a rate is asked for."""
_TIMEOUT_SECONDS = 240.0  # without a message


@dataclass(frozen=True)
class NewRate:
    """Rank 0 asks for another rate of all links between hosts, in bits per second; None: no limit."""

    rate: float | None


def on_ranks(
    function: Callable[[Send], T],
    ranks: int,
    tell: Tell,
    *,
    link: LinkSettings | None = None,
    variables: Mapping[str, str] | None = None,
) -> T:
    """Call `function(send)` on new ranks, each with one thread, and return rank 0's result.

    If the link is of kind "hosts", the ranks run on hosts with its rate; see `run_world`. Other ranks' messages are
    dropped; rank 0's are texts and `NewRate`.

    Args:
        function: Picklable.
        ranks: The number of processes.
        tell: Called here with each text that rank 0 sends, as progress.
        link: The link between the ranks; None: the loopback, whose rate does not change.
        variables: Variables for the ranks' environment.

    Raises:
        WorldError: A rank raised an error or died, or all fell silent.

    """
    found: list[tuple[T]] = []
    with environment(variables or {}), hosts_on(link or LinkSettings(), ranks) as cluster:

        def hear(message: object) -> None:
            if isinstance(message, str):
                tell(message)
            elif isinstance(message, tuple):
                found.append(message)
            elif isinstance(message, NewRate) and cluster is not None:
                cluster.set_rate(message.rate)

        run_world(_call, ranks, function, hear, timeout=_TIMEOUT_SECONDS, cluster=cluster)
    ((value,),) = found
    return value


def _call(rank: int, ranks: int, function: Callable[[Send], object], send: Send) -> None:
    torch.set_num_threads(1)
    value = function(send if rank == 0 else silent)
    if rank == 0:
        send((value,))


def same_step(task: str, bucket_mib: float | None = None) -> Stepper:
    """Return the stepper of a task whose `ddp_core` sends only gradients, and whose steps are all on one batch.

    Args:
        task: A built-in task, as on the command line.
        bucket_mib: The bucket size in MiB; None: the DDP's default.

    """
    loaded = load_task(Spec.parse(task, "task"))
    names = [name for name, _ in loaded.model.named_buffers()]  # which it would broadcast before each forward pass
    loaded.model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]  # 'expression has type "list[str]"'
    return Stepper(loaded, wrap_in_ddp(loaded.model, "core", bucket_mib), same_batch=True)
