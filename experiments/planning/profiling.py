"""`commhooks profile`: the split of the time of a task's steps, and the time that every hook adds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.markup import escape
from rich.table import Table

from commhooks.errors import CommHooksError
from commhooks.units import bytes_in_words, counted

from .. import predicting
from ..devices import own_device, uses_streams
from ..hooks import make_hook, policy_of
from ..launch import Send, WorldError
from ..links.link import LinkSettings, Wire
from ..links.linked_group import LinkedGroup
from ..predicting import Candidate, Profile
from ..predicting.candidates import ALL_REDUCE, label_in_profile
from ..predicting.profiles import StepParts
from ..predicting.turns import LEAST_STEPS
from ..report.table import plain_table
from ..report.words import percent
from ..runs import check_ddp
from ..specs import Spec
from ..tasks import load_task
from ..training.registration import wrap_in_ddp
from ..training.stepper import Stepper
from ..training.stock import is_stock
from .worlds import run_over

_SILENCE = 300.0  # seconds beyond those of the profile itself: a task may take long to load


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The settings of a profile."""

    task: Spec
    hooks: tuple[Spec, ...] | None = None  # None: a profile's default hooks
    link: LinkSettings
    ddp: str = "core"
    bucket_cap_mb: float | None = None
    steps: int | None = None
    seconds: float = 60.0
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Refused:
    """The message that there is no profile."""

    why: str


def measure_profile(asked: Asked, ranks: int) -> Profile | None:
    """Return the profile on the process that reports: this one, or torchrun's rank 0; None on torchrun's others.

    Raises:
        ValueError: There is no such task or hook, or it does not accept the task's parameters.
        WorldError: A rank failed, or steps do not fit into the time; the message says why.

    """
    check_asked(asked)
    found: list[Profile] = []

    def hear(message: object) -> None:
        if isinstance(message, Refused):
            raise WorldError(f"error: {message.why}")
        assert isinstance(message, Profile), "ranks send nothing else"
        found.append(message)

    timeout = _SILENCE + asked.seconds
    run_over(asked.link, profile_on_rank, ranks, asked, hear, timeout=timeout, device=asked.device)
    return found[0] if found else None


def check_asked(asked: Asked) -> None:
    """Raise ValueError if a setting cannot work, a name does not exist, or a hook does not accept the task."""
    check_ddp("profile", asked.ddp, asked.bucket_cap_mb)
    if asked.steps is not None and asked.steps < LEAST_STEPS:
        raise ValueError(f"steps must be a whole number of at least {LEAST_STEPS} (got {asked.steps})")
    if not 0 < asked.seconds < math.inf:
        raise ValueError(f"a profile takes a time above zero, in seconds (got {asked.seconds:g})")
    parameters = dict(load_task(asked.task, asked.seed).model.named_parameters())
    for spec in asked.hooks or ():
        if is_stock(spec):
            raise ValueError(
                f"hook {spec.label!r} is PyTorch's own, whose rounds cannot be watched: profile one of ours"
            )
        make_hook(spec, asked.seed).check(parameters, None)


@contextmanager
def stepper(asked: Asked) -> Iterator[Stepper]:
    """Yield a stepper of the task's model in its DistributedDataParallel, over an emulated link if requested."""
    torch.set_num_threads(1)
    device = own_device(asked.device)
    task = load_task(asked.task, asked.seed, device)
    world = dist.group.WORLD
    assert world is not None, "ranks have a process group"
    is_linked = asked.link.kind == "emulated" and not uses_streams(device)
    group = LinkedGroup(world, Wire(asked.link)) if is_linked else None
    step = Stepper(task, wrap_in_ddp(task.model, asked.ddp, asked.bucket_cap_mb, group))
    try:
        yield step
    finally:
        del step.ddp  # a DDP must go before its process group does
        if group is not None:
            group.close()


def profile_step(
    step: Stepper, asked: Asked, *, as_ranks: int | None = None, group: dist.ProcessGroup | None = None
) -> Profile:
    """Return the profile of a task's steps, as one of `as_ranks` or of the group's ranks; all ranks must call it."""
    return predicting.profile(
        step.ddp,
        step,
        hooks=candidates_of(asked),
        steps=asked.steps,
        seconds=asked.seconds,
        name=step.task.name,
        link=asked.link.label,
        process_group=group or dist.group.WORLD,
        as_ranks=as_ranks,
    )


def candidates_of(asked: Asked) -> list[Candidate] | None:
    """Return the hooks asked for; None: a profile's default hooks."""
    if asked.hooks is None:
        return None
    own = [(spec, make_hook(spec, asked.seed)) for spec in asked.hooks if label_in_profile(spec.label) != ALL_REDUCE]
    return [Candidate(str(spec.having(policy=None)), made, policy_of(spec), spec.label) for spec, made in own]


def profile_on_rank(rank: int, ranks: int, asked: Asked, send: Send) -> None:
    """Profile the task; rank 0 sends the result, and each rank that fails sends the reason."""
    with stepper(asked) as step:
        try:
            found = profile_step(step, asked)
        except CommHooksError as error:
            send(Refused(str(error)))
            return
    if rank == 0:
        send(found)


def profile_table(found: Profile) -> Table:
    """Return a table of all settings: the step, and its parts."""
    title = (
        f"{found.model}, {counted(found.ranks, 'rank')}, {found.ddp} DDP; nothing is sent but in the first row; "
        f"milliseconds, median (quartiles) of {found.noop.steps} steps"
    )
    table = plain_table(title, ("step", "forward", "backward", "exposed", "optimizer", "state"), first="hook")
    table.add_row("plain all-reduce", *_row(found.plain), "")
    for label, hook in found.hooks.items():
        table.add_row(escape(label), *_row(hook.step), bytes_in_words(hook.state_bytes) if hook.state_bytes else "")
    return table


def sentences(found: Profile) -> Sequence[str]:
    """Return the conclusions from a profile, as sentences."""
    first, last = (f"{1e3 * one.ready:.1f} ms ({one.name})" for one in (found.gradients[0], found.gradients[-1]))
    buckets = found.hooks["noop"].buckets
    handed_in = ", ".join(f"{1e3 * bucket.ready:.1f}" for bucket in buckets)
    return (
        f"Noop bound: {found.verdict()}.",
        f"Gradients are ready from {first} to {last}, {counted(len(buckets), 'bucket')} at {handed_in} ms.",
        f"The profiler itself took {percent(found.own_share)} of a step.",
    )


def _row(step: StepParts) -> list[str]:
    whole = step.seconds
    parts = (step.forward, step.backward, step.exposed, step.optimizer)
    return [
        f"{1e3 * whole.median:.2f} ({1e3 * whole.low:.2f}–{1e3 * whole.high:.2f})",
        *(f"{1e3 * part:.2f}" for part in parts),
    ]
