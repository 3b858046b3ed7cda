"""The settings of the command, as text, and the estimate that they ask for."""

from __future__ import annotations

import math
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ..links.link import parse_latency, parse_rate
from ..predicting.costs import Costs
from ..predicting.estimates import Estimate, estimate
from ..runs import Compute, check_ddp
from ..specs import Spec
from ..tasks import LoadedTask, load_task

_POWERS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_WARM_UP, _STEPS = 1, 3  # steps of a task whose compute is not stated


@dataclass(frozen=True, kw_only=True)
class Request:
    """The settings of an estimate, written as on the command line."""

    parameters: str | None = None
    task: str | None = None  # instead of parameters
    compute: str | None = None  # None: timed here, which needs a task
    optimizer: str = "0"
    ranks: int = 4
    rate: str = "1Gbit/s"
    latency: str = "50us"
    ranks_per_host: int = 1
    cores: int = 1
    hooks: tuple[str, ...] | None = None
    bucket_cap_mb: float | None = None
    matrix: str = "1M"
    copy_rate: str | None = None
    backend: str = "gloo"
    costs: Path | None = None  # None: the package's
    sharded: bool = False


def estimated(request: Request) -> Estimate:
    """Return the estimate.

    Raises:
        ValueError: Something does not parse, is missing, or cannot work.

    """
    if (request.parameters is None) == (request.task is None):
        raise ValueError("give --parameters 25M, or --task module:function: the model that is to be trained")
    if request.parameters is not None and request.compute is None:
        raise ValueError("--parameters needs the seconds of a step's compute: --compute 100ms")
    check_ddp("estimate", "core", request.bucket_cap_mb)
    factor, seconds, optimizer = 1.0, None, parse_latency(request.optimizer)
    if request.compute is not None:
        stated = Compute.parse(request.compute)
        factor, seconds = stated.factor or 1.0, stated.seconds
    if request.parameters is not None and seconds is None:
        raise ValueError(
            f"--compute {request.compute} is a factor of a task's time here: name a --task, or give seconds"
        )
    rate, copy_rate = rate_in(request.rate), None
    if request.copy_rate is not None:
        copy_rate = rate_in(request.copy_rate) / 8
    hooks = None if request.hooks is None else [Spec.parse(hook).label for hook in request.hooks]
    task = None if request.task is None else load_task(Spec.parse(request.task, "task"))
    if task is not None and seconds is None:
        timed, optimizer_timed = time_step(task, request.ranks)
        seconds = factor * timed
        optimizer = optimizer or factor * optimizer_timed
    assert seconds is not None, "stated or timed"
    return estimate(
        task.model if task is not None else count_in(request.parameters or ""),
        compute=seconds,
        optimizer=optimizer,
        ranks=request.ranks,
        rate=rate,
        latency=parse_latency(request.latency),
        ranks_per_host=request.ranks_per_host,
        cores=request.cores,
        hooks=hooks,
        bucket_cap_mb=request.bucket_cap_mb,
        matrix=count_in(request.matrix),
        copy_rate=copy_rate,
        backend=request.backend,
        costs=None if request.costs is None else Costs.read(request.costs),
        sharded=request.sharded,
    )


def time_step(task: LoadedTask, ranks: int) -> tuple[float, float]:
    """Return the median seconds of forward and backward pass, and of the optimizer, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        optimizer, found = task.optimizer(), []
        for step in range(_WARM_UP + _STEPS):
            batch = task.batch(step, 0, ranks)
            begun = time.perf_counter()
            task.loss(task.model, batch).backward()
            computed = time.perf_counter()
            optimizer.step()
            found.append((computed - begun, time.perf_counter() - computed))
            optimizer.zero_grad()
    finally:
        torch.set_num_threads(threads)
    compute, update = zip(*found[_WARM_UP:], strict=True)
    return statistics.median(compute), statistics.median(update)


def count_in(text: str) -> float:
    """Return the number in a text such as '124M' or '1.5B'.

    Raises:
        ValueError: The text is not a number above zero, with k, M, B or T after it or nothing.

    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kMBT]?)\s*", text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"parameters {text!r} does not parse: expected a number above zero, such as '124M' or '1B'")
    return float(match[1]) * _POWERS[match[2]]


def rate_in(text: str) -> float:
    """Return the bits per second in a text; inf: no limit."""
    return parse_rate(text) or math.inf
