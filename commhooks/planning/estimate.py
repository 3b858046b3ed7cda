"""What each compressor would make of a step, by arithmetic: no processes, and no link.

The step of W ranks under each compressor is that of `commhooks.planning.step_time`, given

    compute        C seconds, as stated: a third forward, two thirds backward; the optimizer's seconds come after it
    buckets        as a DDP makes them; the backward pass takes as long for each as it has elements
    payloads       counted: the compressor runs here once on random gradients, as one of W ranks
    compression    of each bucket, before round i:  bucket_seconds / (rounds + 1) + copy · Σ cost_i(parameter),
                   and round_seconds more after each round
    link           `commhooks.planning.links.Link` with the stated rate, latency + hop_seconds for each message that
                   waits for another one, and copies_per_byte · copy / 4 seconds of the processor for each byte sent

`copy` is the time in which this machine copies an element of fp32; bucket_seconds, cost_i, round_seconds, hop_seconds
and copies_per_byte are the measured costs of `commhooks.planning.costs`. If nothing overlapped, this would be

    seconds = C + optimizer + Σ compression + Σ bytes on the link · 8 / rate + Σ messages · latency

but a bucket travels while others are computed and compressed, so the model follows the processor and the link through
the step. Then

    speed-up        = seconds under all-reduce / seconds under the compressor
    break-even rate : that at which both are equal; below it, the compressor pays
    utilisation     = (C + optimizer) / seconds
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from commhooks.errors import SettingsError
from commhooks.language.compressor import Compressor
from commhooks.making import make_compressor
from commhooks.planning.costs import Costs, HookCosts, copy_seconds
from commhooks.planning.links import Link
from commhooks.planning.payloads import rounds_of
from commhooks.planning.profile import Sends
from commhooks.planning.sizes import Shape, in_buckets, ready_moments, square_matrices
from commhooks.planning.step_time import Bucket, Stage, Step, StepTime, step_time

DENSE = "all-reduce"
MATRIX = 1_000_000
"""Elements of the square matrices that a model of which only the size is known is taken to consist of."""
LATENCY = 50e-6
"""Seconds, of a network about which nothing is said."""
_LOWEST, _HIGHEST = 1e4, 1e14  # bits per second, between which the break-even rate is looked for
MOST_RANKS = 4096
"""For which payloads are counted."""
_TO_THE = 1e-4  # as a part of the rate


@dataclasses.dataclass(frozen=True)
class HookEstimate:
    """One compressor's step."""

    hook: str
    time: StepTime
    speed_up: float
    """Over dense all-reduce."""
    break_even: float
    """The rate in bits per second below which it pays; `math.inf`: at every rate; 0: at none; NaN: of dense itself."""

    @property
    def pays(self) -> bool:
        """Whether the step is faster than under dense all-reduce."""
        return self.speed_up > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The steps of all compressors, the fastest first."""

    hooks: tuple[HookEstimate, ...]
    parameters: int
    buckets: int
    ranks: int
    link: Link
    copy_rate: float
    """Bytes per second that the processor copies, timed or stated."""

    @property
    def best(self) -> HookEstimate:
        """The compressor with the fastest step, which may be dense all-reduce."""
        return self.hooks[0]

    def of(self, hook: str) -> HookEstimate:
        """Return the estimate of one compressor.

        Raises:
            KeyError: It was not asked for.

        """
        return {one.hook: one for one in self.hooks}[hook]


def estimate(
    parameters: float | nn.Module,
    *,
    compute: float,
    ranks: int,
    rate: float,
    latency: float = LATENCY,
    optimizer: float = 0.0,
    hooks: Iterable[str] | None = None,
    cores: int = 1,
    ranks_per_host: int = 1,
    bucket_cap_mb: float | None = None,
    matrix: float = MATRIX,
    copy_rate: float | None = None,
    costs: Costs | None = None,
) -> Estimate:
    """Estimate the step time of every compressor, by arithmetic with costs that were measured beforehand.

    Args:
        parameters: A model, of which only names and shapes are read, or how many parameters it has.
        compute: Seconds of a rank's forward and backward pass, without communication.
        ranks: How many there are.
        rate: Bits per second of each host's link; `math.inf`: no limit.
        latency: Seconds of the network for a message, without the time that Gloo itself takes.
        optimizer: Seconds of the optimizer. If it is not known, include it in `compute`.
        hooks: Names with settings, such as "powersgd:rank=4"; None: all whose costs are known. Dense all-reduce is
            always among them.
        cores: Of each rank; with 2 or more, compression runs beside the backward pass.
        ranks_per_host: How many ranks share a host and its link.
        bucket_cap_mb: Of the DDP, in MiB; None: 1 for the first bucket, and 25.
        matrix: Elements of each of the square matrices that `parameters` are in, if they are only a number.
        copy_rate: Bytes per second that a rank's processor copies; None: timed here, which takes 0.1 s.
        costs: None: those that come with this package.

    Raises:
        SettingsError: A value cannot work, or the costs of a hook are not known; the message names those that are.

    """
    _check(compute, optimizer, ranks, copy_rate)
    costs = Costs.read() if costs is None else costs
    wanted = list(dict.fromkeys([DENSE, *(costs.hooks if hooks is None else hooks)]))
    if unknown := [hook for hook in wanted if hook not in costs.hooks]:
        raise SettingsError(
            f"estimate(hooks=[{unknown[0]!r}]): the costs of this hook were not measured; expected some of "
            f"{', '.join(costs.hooks)}"
        )
    made_up = not isinstance(parameters, nn.Module)
    shapes = _made_up(parameters, matrix) if not isinstance(parameters, nn.Module) else _shapes_of(parameters)
    places = in_buckets(shapes, bucket_cap_mb)
    buckets = [tuple(shapes[place] for place in bucket) for bucket in places]
    copy = copy_seconds() if copy_rate is None else 4 / copy_rate
    link = Link(rate=rate, latency=latency + costs.hop_seconds, ranks_per_host=ranks_per_host)
    link.transfer("all-reduce", 1, ranks)  # raises if the ranks do not fill their hosts
    plain = Step(compute=compute, optimizer=optimizer, buckets=(), cores=cores)
    cases = {}
    for hook in wanted:
        own = costs.hooks[hook]
        sends = _sends_of(make_compressor(own.compressor), buckets, ranks, are_alike=made_up)
        exchanges = _exchanges(own, costs.round_seconds, buckets, sends, compute, ranks, copy)
        cases[hook] = Case(
            dataclasses.replace(plain, buckets=exchanges),
            dataclasses.replace(link, seconds_per_byte=own.copies_per_byte * copy / 4),
            ranks,
        )
    return Estimate(
        hooks=_compared(cases),
        parameters=sum(map(math.prod, shapes)),
        buckets=len(buckets),
        ranks=ranks,
        link=link,
        copy_rate=4 / copy,
    )


def _check(compute: float, optimizer: float, ranks: int, copy_rate: float | None) -> None:
    for name, value in (("compute", compute), ("copy_rate", copy_rate)):
        if value is not None and not 0 < value < math.inf:
            raise SettingsError(f"estimate({name}={value!r}): {name} must be above zero and finite.")
    if not 0 <= optimizer < math.inf:
        raise SettingsError(f"estimate(optimizer={optimizer!r}): optimizer must be in [0, inf), in seconds.")
    if ranks < 2:
        raise SettingsError(f"estimate(ranks={ranks!r}): one rank sends nothing; ranks must be at least 2.")
    if ranks > MOST_RANKS:
        raise SettingsError(
            f"estimate(ranks={ranks!r}): ranks must be at most {MOST_RANKS:,}; a gathered answer of more does not fit "
            "into memory, where payloads are counted. 'commhooks simulate' extrapolates them."
        )


def _made_up(parameters: float, matrix: float) -> list[Shape]:
    for name, value in (("parameters", parameters), ("matrix", matrix)):
        if not 1 <= value < math.inf:
            raise SettingsError(f"estimate({name}={value!r}): {name} must be a finite number of at least 1.")
    return square_matrices(parameters, matrix)


def _shapes_of(model: nn.Module) -> list[Shape]:
    """Return the shapes of the parameters that are trained, in the model's order."""
    shapes = [tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad]
    if not shapes:
        raise SettingsError(f"estimate({type(model).__name__}): the model has no parameter that requires a gradient.")
    return shapes


def _sends_of(
    compressor: Compressor, buckets: Sequence[tuple[Shape, ...]], ranks: int, *, are_alike: bool
) -> list[tuple[Sends, ...]]:
    """Return what each bucket sends in each round.

    Buckets of the same shapes are counted once. If all parameters are alike, only one parameter is, and its payload
    multiplied.
    """
    counted: dict[tuple[Shape, ...], tuple[Sends, ...]] = {}
    found = []
    for shapes in buckets:
        key = shapes[:1] if are_alike else shapes
        if key not in counted:
            generator = torch.Generator().manual_seed(0)
            gradients = {str(place): torch.randn(shape, generator=generator) for place, shape in enumerate(key)}
            counted[key] = rounds_of(compressor, gradients, ranks)
        times = len(shapes) // len(key)
        found.append(tuple(tuple((kind, times * payload) for kind, payload in sends) for sends in counted[key]))
    return found


def _exchanges(
    costs: HookCosts,
    round_seconds: float,
    buckets: Sequence[tuple[Shape, ...]],
    sends: Sequence[tuple[Sends, ...]],
    compute: float,
    ranks: int,
    copy: float,
) -> tuple[Bucket, ...]:
    """Return the exchanges of all buckets under one hook."""
    moments = ready_moments([sum(map(math.prod, shapes)) for shapes in buckets], compute)
    found = []
    for shapes, mine, moment in zip(buckets, sends, moments, strict=True):
        first, *later = costs.seconds(shapes, ranks, copy, len(mine))
        *before, after = [first, *(seconds + round_seconds for seconds in later)]
        found.append(Bucket(moment, tuple(map(Stage, before, mine)), after))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step on a link, whose rate may be varied."""

    step: Step
    link: Link
    ranks: int

    def time(self, rate: float | None = None) -> StepTime:
        """Return the step's time, at the link's own rate or at another one."""
        link = self.link if rate is None else dataclasses.replace(self.link, rate=rate)
        return step_time(self.step, link, self.ranks)


def _compared(cases: Mapping[str, Case]) -> tuple[HookEstimate, ...]:
    """Return all hooks beside dense all-reduce, the fastest first."""
    dense = cases[DENSE]
    seconds = dense.time().seconds
    found = []
    for hook, case in cases.items():
        time = case.time()
        rate = math.nan if hook == DENSE else break_even_rate(dense, case)
        found.append(HookEstimate(hook, time, seconds / time.seconds, rate))
    return tuple(sorted(found, key=lambda one: one.time.seconds))


def break_even_rate(dense: Case, other: Case) -> float:
    """Return the rate of the link below which the other step is faster; `math.inf`: at any; 0: at none.

    It is looked for between 10 kbit/s and 100 Tbit/s; if there are several, the lowest is returned.
    """

    def is_ahead(rate: float) -> bool:
        return other.time(rate).seconds < dense.time(rate).seconds

    rates = np.geomspace(_LOWEST, _HIGHEST, 11).tolist()
    first = next((place for place, rate in enumerate(rates) if not is_ahead(rate)), None)
    if first is None:
        return math.inf
    if first == 0:
        return 0.0
    low, high = rates[first - 1], rates[first]
    while high / low > 1 + _TO_THE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_ahead(middle) else (low, middle)
    return math.sqrt(low * high)
