"""Measuring in the ranks of a command: the profile of a task, the probe of a link, and real steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from commhooks.errors import CommHooksError
from commhooks.experiments.devices import own_device, uses_streams
from commhooks.experiments.hooks import make_hook, policy_of
from commhooks.experiments.launch import Send
from commhooks.experiments.links.link import LinkSettings, Wire
from commhooks.experiments.links.linked_group import LinkedGroup
from commhooks.experiments.planning.candidates import (
    ALL_REDUCE,
    Candidate,
    default_candidates,
    label_in_profile,
    with_the_two,
)
from commhooks.experiments.planning.probes import Probe
from commhooks.experiments.planning.probing import probe
from commhooks.experiments.planning.profiles import Profile
from commhooks.experiments.planning.profiling import profile
from commhooks.experiments.planning.sizes import LEAST_SECONDS, MOST_SECONDS
from commhooks.experiments.planning.stepping import measure_steps
from commhooks.experiments.planning.turns import LEAST_STEPS
from commhooks.experiments.planning.worlds import Refused, around, found_by
from commhooks.experiments.runs import check_ddp
from commhooks.experiments.specs import Spec
from commhooks.experiments.tasks import load_task
from commhooks.experiments.training.registration import wrap_in_ddp
from commhooks.experiments.training.stepper import Stepper
from commhooks.experiments.training.stock import is_stock

_SILENCE = 300.0  # seconds beyond those of measuring: a task may take long to load


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be measured in the ranks of a command."""

    task: Spec | None = None  # None: no profile
    hooks: tuple[Spec, ...] | None = None  # None: a profile's default hooks
    link: LinkSettings = field(default_factory=LinkSettings)
    ddp: str = "core"
    bucket_cap_mb: float | None = None
    steps: int | None = None
    seconds: float = 60.0  # of the profile
    seed: int = 0
    device: str = "cpu"
    probe_seconds: float | None = None  # None: no probe
    profiled: Profile | None = None  # whose messages the probe is to measure
    real_seconds: float | None = None  # of real steps under every hook; None: none


@dataclass(frozen=True)
class Measured:
    """What the ranks found."""

    profile: Profile | None
    probe: Probe | None = None
    steps: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Seconds of real steps, by label."""


def measure(asked: Asked, ranks: int) -> Measured | None:
    """Return the measurements on the process that reports: this one, or torchrun's rank 0; None on torchrun's others.

    Raises:
        ValueError: There is no such task or hook, or it does not accept the task's parameters.
        WorldError: A rank failed, or something could not be measured; the message says why.

    """
    check_asked(asked)
    if asked.probe_seconds is not None:
        check_probe(ranks, asked.probe_seconds)
    seconds = asked.seconds + (asked.probe_seconds or 0.0) + 2 * (asked.real_seconds or 0.0)
    found: Measured | None = found_by(
        asked.link, measure_on_rank, ranks, asked, timeout=_SILENCE + seconds, device=asked.device
    )
    return found


def check_probe(ranks: int, seconds: float) -> None:
    """Raise ValueError if there are fewer than two ranks, or a probe cannot take this many seconds."""
    if ranks < 2:
        raise ValueError(f"a link is measured between two ranks or more (got {ranks}): give --ranks 2")
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise ValueError(f"a probe takes {LEAST_SECONDS:g} to {MOST_SECONDS:g} seconds (got {seconds:g})")


def check_asked(asked: Asked) -> None:
    """Raise ValueError if a setting cannot work, a name does not exist, or a hook does not accept the task."""
    check_ddp("profile", asked.ddp, asked.bucket_cap_mb)
    if asked.steps is not None and asked.steps < LEAST_STEPS:
        raise ValueError(f"steps must be a whole number of at least {LEAST_STEPS} (got {asked.steps})")
    if not 0 < asked.seconds < math.inf:
        raise ValueError(f"a profile takes a time above zero, in seconds (got {asked.seconds:g})")
    if asked.task is None:
        return
    parameters = dict(load_task(asked.task, asked.seed).model.named_parameters())
    for spec in asked.hooks or ():
        if is_stock(spec):
            raise ValueError(
                f"hook {spec.label!r} is PyTorch's own, whose rounds cannot be watched: profile one of ours"
            )
        make_hook(spec, asked.seed).check(parameters, None)


def measure_on_rank(rank: int, ranks: int, asked: Asked, send: Send) -> None:
    """Measure what is asked; rank 0 sends the result, and each rank that fails the reason."""
    torch.set_num_threads(1)
    try:
        if asked.task is None:
            found = Measured(None, _probed(asked, asked.profiled))
        else:
            with stepper(asked) as step:
                own = asked.profiled or profile_step(step, asked)
                probed = None if asked.probe_seconds is None else _probed(asked, own)
                taken: Mapping[str, Sequence[float]] = {}
                if asked.real_seconds is not None:
                    taken = measure_steps(step, _all_of(asked), asked.real_seconds, around(asked.link))
                found = Measured(own, probed, taken)
    except CommHooksError as error:
        send(Refused(str(error)))
        return
    if rank == 0:
        send(found)


@contextmanager
def stepper(asked: Asked) -> Iterator[Stepper]:
    """Yield a stepper of the task's model in its DistributedDataParallel, over an emulated link if requested."""
    torch.set_num_threads(1)
    assert asked.task is not None, "steps are a task's"
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
    return profile(
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


def _all_of(asked: Asked) -> list[Candidate]:
    given = candidates_of(asked)
    return with_the_two(default_candidates() if given is None else given)


def _probed(asked: Asked, own: Profile | None) -> Probe:
    assert asked.probe_seconds is not None, "a probe was asked for"
    return probe(
        seconds=asked.probe_seconds,
        device=own_device(asked.device),
        wrap_communicator=around(asked.link),
        link=asked.link.label,
        profile=own,
    )
