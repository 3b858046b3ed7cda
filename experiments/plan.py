"""Turning a request into runs, and rejecting what cannot work before any process starts."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from .hooks import make_hook
from .launch import torchrun_world
from .link import LinkSettings
from .runs import HookSpec, RunSettings
from .tasks import make_task, task_names


def plan(
    tasks: Sequence[str],
    hooks: Sequence[str],
    *,
    ranks: int | None,
    link: LinkSettings,
    steps: int | None,
    size: str,
    seed: int,
    ddp: str,
    bucket_cap_mb: float | None,
    evaluate_every: int,
) -> tuple[RunSettings, ...]:
    """Return one run for every task and hook, in that order.

    Args:
        tasks: Names of tasks.
        hooks: Hooks as text, such as 'powersgd:rank=4'.
        ranks: How many ranks; None: torchrun's world size, or 2.
        link: The link between two ranks.
        steps: Optimizer steps; None: each task's own number.
        size: The preset of the models.
        seed: Seed of model, data and compressors.
        ddp: 'core' or 'torch'.
        bucket_cap_mb: MiB; None: the DDP's own.
        evaluate_every: Steps between two evaluations.

    Raises:
        ValueError: Something requested does not exist or cannot work.

    """
    if not tasks or not hooks:
        raise ValueError("nothing to compare: name at least one task and one hook")
    specs = _known_hooks(hooks)
    _refuse_repeats([*tasks, *(spec.label for spec in specs)])
    world = world_size(ranks)
    known = [make_task(_known_task(task), size) for task in tasks]
    for task in known:
        task.batch(seed, 0, world - 1, world)  # raises if there is too little data for so many ranks
        parameters = dict(task.model(seed).named_parameters())
        for spec in specs:
            make_hook(spec).check_parameters(parameters)
    return tuple(
        RunSettings(
            task=task.name,
            size=size,
            hook=spec,
            ranks=world,
            steps=task.default_steps if steps is None else steps,
            seed=seed,
            link=link,
            ddp=ddp,
            bucket_cap_mb=bucket_cap_mb,
            evaluate_every=evaluate_every,
        )
        for task in known
        for spec in specs
    )


def _known_hooks(hooks: Sequence[str]) -> list[HookSpec]:
    """Return the hooks; each is made once, so that a mistake shows before any process starts."""
    specs = [HookSpec.parse(hook) for hook in hooks]
    for spec in specs:
        make_hook(spec)
    return specs


def _refuse_repeats(texts: Sequence[str]) -> None:
    for text in texts:
        if texts.count(text) > 1:
            raise ValueError(f"{text} is given twice: each task and each hook is run once")


def world_size(ranks: int | None) -> int:
    """Return how many ranks there will be.

    Raises:
        ValueError: Fewer than one, or different from torchrun's world size.

    """
    joined = torchrun_world()
    if joined is not None and ranks not in {None, joined[1]}:
        raise ValueError(
            f"ranks: {ranks} requested, but torchrun started {joined[1]}; leave --ranks out under torchrun"
        )
    if ranks is not None and ranks < 1:
        raise ValueError(f"ranks must be at least 1 (got {ranks})")
    return joined[1] if joined is not None else ranks or 2


def _known_task(task: str) -> str:
    if task not in task_names():
        near = difflib.get_close_matches(task, task_names(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"task {task!r} is not known: expected one of {', '.join(task_names())}{hint}")
    return task
