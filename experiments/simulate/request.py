"""The settings of a simulation, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..hooks import make_hook
from ..links.link import format_rate
from ..predicting.costs import check_backend
from ..predicting.link import Link
from ..predicting.step_time import Step
from ..report.words import listed
from ..runs import Compute
from ..seldom import Seldom, exchanged
from ..specs import Spec, is_seldom

DEFAULT_HOOKS = ("all-reduce", "fp16", "int8", "powersgd:rank=4", "top-k:ratio=0.01")
SHARDED_HOOKS = ("all-reduce", "bf16", "int8", "int4")  # of FSDP2, beside plain
OF_SIZES = ("all-reduce", "fp16", "bf16")  # hooks whose payload follows from the number of parameters
TABLE, PICTURE, DATA = "simulation.csv", "utilisation.png", "simulation.json"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The settings of a simulation."""

    hooks: tuple[Spec, ...]
    ranks: tuple[int, ...]
    links: tuple[Link, ...]
    task: Spec | None = None
    measured: Path | None = None  # measurements of an earlier command; None: measure now
    parameters: float | None = None  # instead of a task
    compute: str | None = None  # the time of a step's compute on the user's processor
    cores: int = 1
    backend: str = "none"  # "gloo": its CPU time is counted
    copy_rate: float | None = None  # bytes per second that the processor copies; None: measured here
    bucket_cap_mb: float | None = None
    sharded: bool = False  # by FSDP2
    save: Path | None = None
    out: Path | None = None
    overwrite: bool = False
    command: str = "commhooks simulate"


def check_request(request: Request) -> None:
    """Raise ValueError if the request contradicts itself, before anything is measured."""
    given = [request.parameters is not None, request.measured is not None, request.task is not None]
    if sum(given) > 1:
        raise ValueError("give one of --task, --measured and --parameters: each says whose compute is simulated")
    if request.parameters is not None:
        _check_sizes(request)
    for option, value in (("--save", request.save), ("--bucket-cap-mb", request.bucket_cap_mb)):
        if value is not None and any(given[:2]):
            raise ValueError(f"{option} is for measuring, but with --parameters or --measured nothing is measured")
    for label in (texts := [*(hook.label for hook in request.hooks), *map(title_of, request.links)]):
        if texts.count(label) > 1:
            raise ValueError(f"{label} is given twice: it is simulated once")
    _check_sharded(request)
    if request.compute is not None:
        Compute.parse(request.compute)
    Step(compute=0.0, buckets=(), cores=request.cores)  # raises if there are none
    _check_backend(request)
    _ = [Seldom.of(hook).rounds for hook in request.hooks if is_seldom(hook)]  # raises if there can be none
    for ranks in request.ranks:
        for link in request.links:
            link.transfer("all-reduce", 1, ranks)


def _check_sharded(request: Request) -> None:
    """Raise ValueError if FSDP2 cannot train with a hook, or if its modules are unknown."""
    if request.sharded and request.parameters is not None:
        raise ValueError("--sharded needs a task's modules (--task or --measured); commhooks estimate does without")
    for hook in request.hooks if request.sharded else ():
        if is_seldom(hook) or not make_hook(hook).scatters:
            raise ValueError(f"hook {hook.label!r} cannot average shards of gradients, which --sharded needs")


def _check_backend(request: Request) -> None:
    check_backend(request.backend)
    if request.copy_rate is not None and request.backend == "none":
        raise ValueError("--copy-rate states the CPU time of sending, which --backend none does not count")


def _check_sizes(request: Request) -> None:
    """Raise ValueError if sizes alone are not enough."""
    if request.compute is None or Compute.parse(request.compute).seconds is None:
        raise ValueError("--parameters needs the seconds of a step's compute: --compute 100ms")
    unknown = [hook.label for hook in request.hooks if exchanged(hook).label not in OF_SIZES]
    if unknown:
        raise ValueError(
            f"hook {unknown[0]!r} needs the shapes of the parameters and its compression measured: name a task "
            f"(--task), or simulate {listed(OF_SIZES, 'or')} from --parameters"
        )


def check_files(request: Request) -> None:
    """Raise ValueError if a file exists already or cannot be written, before anything is measured."""
    files = [] if request.out is None else [request.out / name for name in (TABLE, PICTURE, DATA)]
    for file in [*files, *filter(None, [request.save])]:
        if file.exists() and not request.overwrite:
            raise ValueError(f"{file} exists already; replace it with --overwrite, or name another place")
        nearest = next(folder for folder in file.absolute().parents if folder.exists())
        if file.is_dir() or not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise ValueError(f"{file} cannot be written, because of {nearest}; name another place")


def title_of(link: Link) -> str:
    """Return the link in words: '1 Gbit/s, 8 ranks per host, 2.4 Tbit/s inside'."""
    text = format_rate(link.rate)
    if link.ranks_per_host > 1:
        text += f", {link.ranks_per_host} ranks per host"
        text += f", {format_rate(link.inner_rate)} inside" if link.inner_rate else ", no link inside"
    return text
