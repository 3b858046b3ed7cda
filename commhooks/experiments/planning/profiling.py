"""Measure where the time of a model's steps goes, and what every hook would add: `profile`."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from commhooks.communicators.parent_group import group_or_default
from commhooks.errors import SettingsError
from commhooks.experiments.machine import load_average, machine_in_words
from commhooks.experiments.planning.candidates import NOOP, Candidate, default_candidates, with_the_two
from commhooks.experiments.planning.keeping import Kept
from commhooks.experiments.planning.measuring import Brief, buckets_of, longest, parts_of, ready_of
from commhooks.experiments.planning.profiles import GradientProfile, HookProfile, Profile
from commhooks.experiments.planning.turns import LEAST_STEPS, PLAIN, Turns
from commhooks.hooks.hook_functions import check_is_free
from commhooks.language.compressor import Compressor
from commhooks.unwrapping import find_ddp, trained_parameters
from ddp_core.guard import local_on_purpose


def profile(
    model: Module,
    step_fn: Callable[[], object],
    *,
    hooks: Iterable[Candidate | Compressor | str] | None = None,
    steps: int | None = None,
    seconds: float = 60.0,
    name: str = "",
    link: str = "",
    process_group: dist.ProcessGroup | None = None,
    as_ranks: int | None = None,
) -> Profile:
    """Measure where the time of a training step goes, and what every hook would add to it without a link.

    Call it on every rank, between two steps. `model` is a DistributedDataParallel, ddp_core's or PyTorch's, or a
    wrapper of one. `step_fn()` runs one whole step of this rank: it takes a batch, and runs the forward pass, the
    backward pass and the optimizer.

    At first some steps run as they are, under the DDP's own all-reduce. Then every hook has its turns, again and again,
    a few steps each, so that other load on the machine slows all of them alike. In these steps nothing is sent: each
    collective is answered at once with what this rank put in. They hold all that a hook costs except transfers: thread
    hand-offs, memory traffic, and the contention of worker and training thread.

    - `hooks`: what to measure besides noop and all-reduce; None: `default_candidates()`. Each is a `Candidate`, which
      has a policy, or whatever `attach` takes.
    - `steps`: how many steps of each hook count, at least 3; None: as many as fit into `seconds`, up to 42.
    - `seconds`: how long to measure, if `steps` is None.
    - `name`: the model's name in reports; empty: its class.
    - `link`: a name for the link; `plan` accepts only a probe of a link with the same name.
    - `process_group`: the ranks that agree on the steps; None: the model's own group.
    - `as_ranks`: measure hooks as if there were this many ranks, at least as many as there are: each collective returns
      as much as that many ranks would send. None: the ranks that there are.

    Afterwards parameters, buffers, gradients and optimizer states are as before: they are copied first, which needs as
    much memory again. Optimizers are found when they step, if they are `torch.optim.Optimizer`s. Everything else that
    `step_fn` changes stays changed: data iterators, learning-rate schedules, random number generators and loss scales
    advance. PyTorch's DistributedDataParallel accepts one hook in its life, so from then on it averages with this
    package's all-reduce, and takes `attach` but no `register_comm_hook`; ddp_core's is as before.

    On a GPU moments are the device's, and a hook's work ends when its stream has done it, for which the host waits: so
    compression overlaps less than in training.

    Returns the same profile on every rank.

    Raises:
        AttachError: The model is not a DistributedDataParallel, or a hook is attached or registered.
        ProfileError: `step_fn` failed; the message names the rank. In a step under the DDP's own all-reduce, other
            ranks may wait for the failed one as they would in training, until its process ends.
        SettingsError: A setting cannot work, or the steps do not fit into `seconds`.

    """
    ddp = find_ddp("profile", model)
    check_is_free("profile", ddp)
    candidates = with_the_two(default_candidates() if hooks is None else hooks)
    named = trained_parameters(model, ddp)
    group = group_or_default(process_group if process_group is not None else getattr(ddp, "process_group", None))
    _check(steps, seconds)
    if as_ranks is not None and (not isinstance(as_ranks, int) or as_ranks < group.size()):
        raise SettingsError(
            f"profile(as_ranks={as_ranks!r}): as_ranks must be a whole number, at least the "
            f"{group.size()} that there are."
        )
    kept = Kept(ddp)
    turns = Turns(ddp, named, step_fn, candidates, kept, group, as_ranks)
    try:
        with local_on_purpose(ddp):
            turns.run(steps, seconds)
    finally:
        kept.restore()
    return _profile_of(turns, ddp, named, candidates, name or type(ddp.module).__name__, link)


def _check(steps: int | None, seconds: float) -> None:
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < LEAST_STEPS):
        raise SettingsError(f"profile(steps={steps!r}): steps must be a whole number of at least {LEAST_STEPS}.")
    if not 0 < seconds < math.inf:
        raise SettingsError(f"profile(seconds={seconds!r}): seconds must be above zero, and finite.")


def _profile_of(
    turns: Turns,
    ddp: Module,
    named: Sequence[tuple[str, Tensor]],
    candidates: Sequence[Candidate],
    name: str,
    link: str,
) -> Profile:
    """Return the profile, which all ranks make of the same figures."""
    brief = {label: [one.brief(len(named)) for one in steps] for label, steps in turns.records.items()}
    of_ranks: list[dict[str, list[Brief]]] = turns.ranks.gather("exchange what was measured", lambda: brief)
    steps = {label: longest([one[label] for one in of_ranks]) for label in brief}
    states: list[dict[str, int]] = turns.ranks.gather("exchange the sizes of states", lambda: turns.state_bytes)
    hooks = {
        one.label: HookProfile(
            one.hook,
            one.policy,
            parts_of(steps[one.label]),
            buckets_of(one.label, steps[one.label]),
            max(state[one.label] for state in states),
        )
        for one in candidates
    }
    noop = steps[NOOP]
    return Profile(
        model=name,
        ranks=turns.world_size,
        ddp="torch" if isinstance(ddp, torch.nn.parallel.DistributedDataParallel) else "core",
        cores=turns.cores,
        plain=parts_of(steps[PLAIN]),
        noop=hooks[NOOP].step,
        gradients=_gradients(named, noop),
        hooks=hooks,
        own_share=sum(step.own_seconds for step in noop) / sum(step.seconds for step in noop),
        link=link,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "commhooks": metadata.version("commhooks"),
        },
        machine=machine_in_words(),
        load=load_average(),
    )


def _gradients(named: Sequence[tuple[str, Tensor]], noop: Sequence[Brief]) -> tuple[GradientProfile, ...]:
    """Return the gradients in the order in which they become ready, without those that never do."""
    ready = ready_of(noop)
    order = [int(number) for number in np.argsort(ready, kind="stable") if not np.isnan(ready[number])]
    return tuple(
        GradientProfile(name, tuple(p.shape), p.numel() * p.element_size(), float(ready[number]))
        for number, (name, p) in ((number, named[number]) for number in order)
    )
