"""The runs of a request, checked before any process starts."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from commhooks.experiments.cluster import check_hosts, check_rates, why_not
from commhooks.experiments.devices import backend_for, own_device
from commhooks.experiments.devices import chosen as chosen_device
from commhooks.experiments.launch import ranks_here, torchrun_world
from commhooks.experiments.links.link import LinkSettings
from commhooks.experiments.machine import cores
from commhooks.experiments.runs import Compute, RunSettings, read_setting
from commhooks.experiments.specs import Spec, is_diloco
from commhooks.experiments.tasks import LoadedTask, load_task
from commhooks.experiments.training.diloco import check_diloco
from commhooks.experiments.training.kinds import check_hook, unsuited_hook
from commhooks.experiments.training.worker import time_scale_of

MOST_RUNS = 10_000
_OWN_DDP = ("core", None)  # the defaults of `ddp` and `bucket_cap_mb`
_OUTERMOST_FIRST = (
    "task",
    "ranks",
    "device",
    "link",
    "optimizer",
    "compute",
    "ddp",
    "bucket_cap_mb",
    "evaluate_every",
    "steps",
    "seed",
    "hook",
)


def plan(
    tasks: Sequence[str],
    hooks: Sequence[str],
    *,
    links: Sequence[str | LinkSettings],
    seeds: Sequence[int] = (0,),
    optimizers: Sequence[str | None] = (None,),
    ranks: Sequence[int | None] = (None,),
    device: str | None = None,
    steps: int | None = None,
    compute: str | None = None,
    ddp: str = "core",
    bucket_cap_mb: float | None = None,
    evaluate_every: int = 20,
) -> tuple[RunSettings, ...]:
    """Return a run for every combination; runs that differ only in their hook are neighbours.

    Args:
        tasks: Names of tasks, with settings.
        hooks: Hooks as text, such as 'powersgd:rank=4'.
        links: The links between the ranks, as text or settings.
        seeds: Seeds of the model, the data and the compressors.
        optimizers: Optimizers as text, such as 'sgd:lr=0.1'; None: the task's own.
        ranks: The number of ranks; None: torchrun's world size, or 2.
        device: 'cpu', 'cuda' or 'auto'; None: 'auto', a GPU if there is one.
        steps: The number of optimizer steps; None: each task's own.
        compute: The time of a step's compute on the user's processor; None: its time here.
        ddp: 'core', 'torch', or 'sharded' for FSDP2.
        bucket_cap_mb: The bucket size in MiB; None: the DDP's own.
        evaluate_every: The number of steps between two evaluations.

    Raises:
        ValueError: Something requested does not exist or cannot work.

    """
    if not tasks or not hooks or not links or not seeds:
        raise ValueError("nothing to run: name at least one task, one hook, one link and one seed")
    named = [Spec.parse(task, "task") for task in tasks]
    chosen: dict[str, Sequence[Any]] = {
        "task": named,
        "hook": hooks,
        "link": links,
        "seed": seeds,
        "optimizer": optimizers,
        "ranks": ranks,
        "device": [chosen_device(device)],
        "steps": [steps],
        "compute": [compute],
        "ddp": [ddp],
        "bucket_cap_mb": [bucket_cap_mb],
        "evaluate_every": [evaluate_every],
    }
    runs = combinations(chosen)
    check_runs(runs)
    return runs


def combinations(chosen: Mapping[str, Sequence[Any]]) -> tuple[RunSettings, ...]:
    """Return a run for every combination of values, each in the form of `RunSettings` or as text.

    A missing setting has one value: the default of `RunSettings`, except for `ranks` (torchrun's world size, or 2),
    `steps` (the task's own number) and `device` (a GPU if there is one).

    Raises:
        ValueError: A value does not parse, is listed twice, or cannot work.

    """
    check_number(math.prod(len(values) for values in chosen.values()))
    columns = [
        [(name, value) for value in _values_of(name, chosen[name])] for name in _OUTERMOST_FIRST if name in chosen
    ]
    runs = []
    for pairs in product(*columns):
        settings = dict(pairs)
        settings["ranks"] = world_size(settings.get("ranks"))
        settings["device"] = chosen_device(settings.get("device"))
        if settings.get("steps") is None:
            settings["steps"] = _own_steps(settings["task"])
        runs.append(RunSettings(**settings))
    return tuple(runs)


def in_turn(runs: Sequence[RunSettings]) -> tuple[RunSettings, ...]:
    """Return the runs in an order in which runs that differ only in their hook are neighbours, and so take turns.

    Raises:
        ValueError: A run is listed twice.

    """
    check_number(len(runs))
    counts = Counter(runs)
    for settings in runs:
        if counts[settings] > 1:
            raise ValueError(f"{settings.label} is listed twice with the same settings: list it once")
    groups: dict[RunSettings, list[RunSettings]] = {}
    for settings in runs:
        groups.setdefault(settings.comparison_group, []).append(settings)
    return tuple(settings for group in groups.values() for settings in group)


def check_number(runs: int) -> None:
    """Raise ValueError if this number of runs is larger than anybody can mean."""
    if runs > MOST_RUNS:
        raise ValueError(
            f"{runs:,} runs are more than the {MOST_RUNS:,} that one command makes: give fewer values, or divide them "
            "among several commands with one folder"
        )


def _values_of(name: str, values: Sequence[Any]) -> list[Any]:
    found = [value if value is None and name in {"ranks", "steps"} else read_setting(name, value) for value in values]
    _refuse_repeats(found)
    return found


@cache
def _own_steps(task: Spec) -> int:
    return load_task(task).steps


def check_runs(runs: Sequence[RunSettings]) -> None:
    """Raise ValueError if one of the runs cannot work: each task takes a step, each hook sees its parameters.

    Warn of hooks that do not suit the optimizer of their task.
    """
    for settings in dict.fromkeys(runs):
        check_hook(settings.hook, is_sharded=settings.is_sharded, backend=_backend_of(settings))
        if settings.is_sharded:
            _check_sharded(settings)
        _check_link(settings)
        _check_compute(settings)
    seen: dict[Spec, LoadedTask] = {}  # each is loaded once, which may take long
    for settings in {(one.task, one.ranks, one.optimizer, one.device): one for one in reversed(runs)}.values():
        if settings.task not in seen or seen[settings.task].device.type != settings.device:
            seen[settings.task] = load_task(settings.task, settings.seed, own_device(settings.device))
        seen[settings.task].optimizer(settings.optimizer)
        seen[settings.task].check(settings.ranks)
    for settings in {(one.task, one.hook, one.is_sharded): one for one in runs}.values():
        named = dict(seen[settings.task].model.named_parameters())
        check_hook(settings.hook, named, is_sharded=settings.is_sharded, backend=_backend_of(settings))
    _check_diloco_runs([one for one in runs if is_diloco(one.hook)], seen)
    if (torchrun_world() or (0, 1))[0] > 0:  # rank 0 tells it
        return
    for settings in {(one.task, one.hook, one.optimizer): one for one in runs}.values():
        task = seen[settings.task]
        if reason := unsuited_hook(settings.hook, task.optimizer(settings.optimizer), task.model):
            warnings.warn(f"{settings.task.label}: {reason}", stacklevel=2)
    for label in sorted(
        {one.hook.label for one in runs if is_diloco(one.hook) and (one.ddp, one.bucket_cap_mb) != _OWN_DDP}
    ):
        warnings.warn(f"{label} trains a plain module: ddp and bucket_cap_mb have no effect on it", stacklevel=2)


def _backend_of(settings: RunSettings) -> str:
    return backend_for(settings.device, settings.link, ranks_here(settings.ranks))


def _check_diloco_runs(runs: Sequence[RunSettings], tasks: Mapping[Spec, LoadedTask]) -> None:
    """Raise ValueError if DiLoCo cannot train one of the runs' tasks."""
    for settings in {(one.task, one.hook, one.optimizer, one.steps): one for one in runs}.values():
        task = tasks[settings.task]
        check_diloco(settings.hook, task.model, task.optimizer(settings.optimizer), settings.steps)


def _check_sharded(settings: RunSettings) -> None:
    """Raise ValueError if FSDP2 would exchange nothing, or a setting would have no effect."""
    if settings.ranks == 1:
        raise ValueError(f"{settings.label}: one rank has no shards to exchange; train a sharded model on at least 2")
    if settings.bucket_cap_mb is not None:
        raise ValueError(f"{settings.label}: FSDP2 exchanges whole modules, not buckets; leave out bucket_cap_mb")


def _check_link(settings: RunSettings) -> None:
    """Raise ValueError if hosts cannot have the link's rates, or this machine cannot have hosts."""
    if settings.link.kind != "hosts":
        return
    if torchrun_world() is not None:
        raise ValueError("under torchrun the ranks have their hosts already; use --link real, or an emulated link")
    check_hosts(settings.ranks)
    _check_rates(settings)
    if reason := why_not():
        raise ValueError(f"link {settings.link.label!r}: {reason}")


def _check_rates(settings: RunSettings) -> None:
    """Raise ValueError if hosts cannot have one of the link's rates, slowed down if compute is stated as a factor.

    If compute is stated in seconds, the rates are known only after it was measured here.
    """
    stated = Compute() if settings.compute is None else Compute.parse(settings.compute)
    if stated.seconds is not None:
        return
    try:
        check_rates(settings.link.slowed(time_scale_of(settings, None)))
    except ValueError as error:
        slowed = "" if stated.factor is None else f" with compute {settings.compute}, by which its rates are multiplied"
        raise ValueError(f"link {settings.link.label!r}{slowed}: {error}") from error


def _check_compute(settings: RunSettings) -> None:
    if settings.compute is None:
        return
    if settings.link.kind == "real":
        raise ValueError(
            "compute cannot be stated on a real network, which cannot be slowed down to match; leave it out"
        )
    if torchrun_world() is not None and Compute.parse(settings.compute).seconds is not None:
        raise ValueError("under torchrun compute can only be stated as a factor, such as '0.5x'")


def crowded(runs: Sequence[RunSettings], available: int | None = None) -> str | None:
    """Return a warning if ranks share cores, so that compute looks slower than it is; otherwise None.

    Args:
        runs: The runs; on a real network, each rank is assumed to have its own machine.
        available: The number of cores of the machine on which the runs are made; None: this machine's.

    """
    if torchrun_world() is not None:
        return None
    available = cores() if available is None else available
    concerned = [settings.ranks for settings in runs if settings.compute is None and settings.link.kind != "real"]
    ranks = max(concerned, default=0)
    if ranks <= available:
        return None
    return (
        f"{ranks} ranks share {available} cores: compute looks {ranks / available:.1f} times as slow as with a core "
        "for each rank, so compression looks less useful than it is. State what a step's compute takes on your "
        "processor, with --compute 200ms, or with --compute 0.5x for half of its time here."
    )


def _refuse_repeats(values: Sequence[object]) -> None:
    for value, times in Counter(values).items():
        if times > 1:
            raise ValueError(f"{getattr(value, 'label', value)} is given twice: each combination is run once")


def world_size(ranks: int | None) -> int:
    """Return the number of ranks: the given one, torchrun's world size, or 2.

    Raises:
        ValueError: The given number is below one, or differs from torchrun's world size.

    """
    joined = torchrun_world()
    if joined is not None and ranks not in {None, joined[1]}:
        raise ValueError(
            f"ranks: {ranks} requested, but torchrun started {joined[1]}; leave --ranks out under torchrun"
        )
    if ranks is not None and ranks < 1:
        raise ValueError(f"ranks must be at least 1 (got {ranks})")
    return joined[1] if joined is not None else ranks or 2
