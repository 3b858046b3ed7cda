"""Each compressor's step time, by arithmetic alone: no processes are started, and no link is used.

The step is predicted (`predicting.py`) from a profile made of tables (`tables.py`) in place of a measured one, over a
`experiments.predicting.link.Link` with

    rate           as stated
    latency        as stated + hop_seconds, for each message that waits for another one
    processor      copies_per_byte · copy / 4 seconds for each byte sent, and round_seconds after each round

`copy` is the time in which this machine copies an element of fp32; hop_seconds, copies_per_byte and round_seconds are
the measured costs of `costs.py`. If nothing overlapped, this would be

    seconds = compute + optimizer + Σ compression + Σ bytes on the link · 8 / rate + Σ messages · latency

but a bucket travels while others are computed and compressed, so the model follows the processor and the link through
the step. Then

    speed-up        = seconds under all-reduce / seconds under the compressor
    utilisation     = (compute + optimizer) / seconds
    pays between    : the rates at which the speed-up is above 1. A compressor that saves bytes pays below a rate, one
                      that saves messages that wait for one another above one, or between two

hop_seconds, round_seconds and copies_per_byte are Gloo's: backend "none" counts none of them.

For a model that FSDP2 shards the step is that of `experiments.predicting.sharded`, and plain FSDP2 is compared with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from torch import nn

from commhooks.errors import SettingsError
from commhooks.making import compressor_in_file, make_compressor

from .accuracy import Accuracy, Loss
from .candidates import DENSE, NOOP, label_in_profile
from .costs import Backend, Costs, check_backend, copy_seconds
from .link import Link
from .paying import RATES, Case, Rates, paying_rates
from .predicting import Unlinked
from .sharded import PLAIN, ShardedModule, modules_of, sharded_step
from .sizes import Shape, in_buckets, square_matrices
from .step_time import StepTime
from .tables import Stated

MATRIX = 1_000_000
"""If only a model's size is known, it is assumed to consist of square matrices with this many elements."""
LATENCY = 50e-6
"""Seconds, of a network about which nothing is said."""
MOST_RANKS = 4096
"""The most ranks for which payloads are counted."""
FASTER = 1.25
"""Each step is computed on a link this many times as fast too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookEstimate:
    """One compressor's step."""

    hook: str
    time: StepTime
    speed_up: float
    """The speed-up over the baseline, dense all-reduce or plain FSDP2."""
    pays_between: Rates
    """The ranges of rates at which it pays, in bits per second; empty: none, or the baseline itself."""
    on_faster_link: float
    """Seconds of the step on a link `FASTER` times as fast. If larger than `time.seconds`, ignore differences this
    small: they come from how transfers line up with compute."""
    losses: tuple[Loss, ...]
    """The accuracy that these settings cost, by task; a missing task was not measured."""
    is_baseline: bool = False

    @property
    def pays(self) -> bool:
        """True if the step is faster than the baseline's."""
        return self.speed_up > 1

    @property
    def break_even(self) -> float:
        """The rate in bits per second below which it pays; `math.inf`: at every rate; 0: at none.

        NaN: of the baseline, and if it pays above a rate or between some, which `pays_between` says.
        """
        if self.is_baseline or len(self.pays_between) > 1 or any(low > 0 for low, _ in self.pays_between):
            return math.nan
        return self.pays_between[0][1] if self.pays_between else 0.0

    @property
    def is_safe(self) -> bool:
        """True if it was measured, and its worst-case loss is within the seed-to-seed range on every task measured."""
        return bool(self.losses) and all(loss.is_safe for loss in self.losses)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The steps of all compressors, the fastest first."""

    hooks: tuple[HookEstimate, ...]
    parameters: int
    buckets: int
    """The number of the DDP's buckets; of a sharded model, the number of modules that are exchanged separately."""
    ranks: int
    link: Link
    """The link, including the latency that the backend adds and the CPU time per byte of dense all-reduce."""
    backend: str
    """One of `experiments.predicting.costs.BACKENDS`."""
    copy_rate: float
    """Bytes per second that the processor copies, timed or stated."""
    level: str | None
    """The compiled passes with which the costs were measured; None: none."""
    tasks: tuple[tuple[str, str], ...]
    """The tasks on which accuracy was measured, each with the unit of its differences."""
    baseline: str = DENSE
    """The hook with which all others are compared: dense all-reduce, or plain FSDP2."""

    @property
    def is_sharded(self) -> bool:
        """True if FSDP2 shards the model."""
        return self.baseline == PLAIN

    @property
    def best(self) -> HookEstimate:
        """The compressor with the fastest step, which may be dense all-reduce."""
        return self.hooks[0]

    @property
    def safest(self) -> HookEstimate | None:
        """The fastest compressor that pays and cost no accuracy where it was measured (`is_safe`); None: there is none.

        It must have been measured on every task.
        """
        safe = [one for one in self.hooks if one.pays and one.is_safe and len(one.losses) == len(self.tasks)]
        return safe[0] if safe else None

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
    backend: str = "gloo",
    costs: Costs | None = None,
    accuracy: Accuracy | None = None,
    sharded: bool = False,
) -> Estimate:
    """Estimate every compressor's step time by arithmetic, from costs that were measured beforehand.

    Args:
        parameters: A model, of which only names and shapes are read, or its number of parameters.
        compute: Seconds of a rank's forward and backward pass, without communication.
        ranks: The number of ranks.
        rate: The rate of each host's link in bits per second; `math.inf`: no limit.
        latency: Seconds that the network takes for a message, without the backend's own time.
        optimizer: Seconds of the optimizer's step. If unknown, include them in `compute`.
        hooks: Names with settings, such as "powersgd:rank=4"; None: all whose costs are known. Dense all-reduce is
            always among them.
        cores: The cores of each rank; with 2 or more, compression overlaps the backward pass.
        ranks_per_host: The number of ranks that share a host and its link.
        bucket_cap_mb: The DDP's bucket size, in MiB; None: 1 for the first bucket, 25 for the others.
        matrix: If `parameters` is a number: the elements of each square matrix that the model is assumed to consist of.
        copy_rate: Bytes that a rank copies per second; None: measured here, which takes 0.1 s.
        backend: "gloo": its CPU time for each byte, message and round is counted; "none": sending uses no CPU time.
        costs: Costs of compression; None: the package's.
        accuracy: Costs in accuracy; None: the package's.
        sharded: If True, FSDP2 shards the model. Hooks that cannot return shards are left out, and plain FSDP2 is the
            baseline. The modules are the model's blocks and the rest of it, or as large as buckets if `parameters` is a
            number.

    Raises:
        SettingsError: A value is invalid, or a hook's costs are not known; the message lists the hooks whose costs are.

    """
    _check(compute, optimizer, ranks, copy_rate)
    check_backend(backend)
    costs = Costs.read() if costs is None else costs
    accuracy = Accuracy.read() if accuracy is None else accuracy
    if DENSE not in costs.hooks:
        raise SettingsError(f"estimate: the costs lack hook {DENSE!r}, with which others are compared.")
    asked = costs.hooks if hooks is None else [_label_of(hook, costs) for hook in hooks]
    compressors = {hook: compressor_in_file(costs.hooks[hook].compressor) for hook in dict.fromkeys([DENSE, *asked])}
    wanted = [hook for hook, own in compressors.items() if own.scatters or not sharded or hooks is not None]
    is_number = not isinstance(parameters, nn.Module)
    stated = Stated(
        shapes=_made_up(parameters, matrix) if not isinstance(parameters, nn.Module) else _shapes_of(parameters),
        compute=compute,
        optimizer=optimizer,
        cores=cores,
        bucket_cap_mb=bucket_cap_mb,
        are_alike=is_number,
    )
    link = Link(rate=rate, latency=latency, ranks_per_host=ranks_per_host)
    link.transfer("all-reduce", 1, ranks)  # raises if the ranks do not fill their hosts
    carrier = Backend(backend, copy_seconds() if copy_rate is None else 4 / copy_rate, costs)
    losses = {hook: accuracy.losses_of(compressors[hook]) for hook in wanted}
    if sharded:
        modules = _modules(parameters, stated)
        units = len(modules)
        steps = {
            hook: sharded_step(
                modules,
                compressors.get(hook),
                ranks,
                compute=compute,
                optimizer=optimizer,
                costs=costs.hooks.get(hook),
                copy=carrier.copy,
                cores=cores,
                overlaps=backend != "gloo",
            )
            for hook in (PLAIN, *wanted)
        }
        cases = {hook: Case(Unlinked(step, ranks), carrier.carry(link, hook)) for hook, step in steps.items()}
        losses[PLAIN] = ()
    else:
        profile = stated.profile({hook: costs.hooks[hook] for hook in wanted}, ranks, carrier.copy)
        units = len(profile.hooks[NOOP].buckets)
        cases = {
            hook: Case(Unlinked.of(profile, profile.hooks[label_in_profile(hook)]), carrier.carry(link, hook))
            for hook in wanted
        }
    return Estimate(
        hooks=_compared(cases, losses, PLAIN if sharded else DENSE),
        parameters=sum(map(math.prod, stated.shapes)),
        buckets=units,
        ranks=ranks,
        link=cases[DENSE].link,
        backend=backend,
        copy_rate=4 / carrier.copy,
        level=costs.level,
        tasks=tuple((task.task, task.unit) for task in accuracy.tasks),
        baseline=PLAIN if sharded else DENSE,
    )


def _modules(parameters: float | nn.Module, stated: Stated) -> list[ShardedModule]:
    if stated.bucket_cap_mb is not None:
        raise SettingsError(f"estimate(bucket_cap_mb={stated.bucket_cap_mb}): FSDP2 exchanges modules; leave it out.")
    if isinstance(parameters, nn.Module):
        return modules_of(parameters)
    return [ShardedModule(tuple(stated.shapes[place] for place in bucket)) for bucket in in_buckets(stated.shapes)]


def _label_of(hook: str, costs: Costs) -> str:
    """Return the label of the compressor that this text spells, in whichever way."""
    wanted = str(make_compressor(hook)) if hook not in costs.hooks else costs.hooks[hook].compressor
    for label, own in costs.hooks.items():
        if own.compressor == wanted:
            return label
    raise SettingsError(
        f"estimate(hooks=[{hook!r}]): the costs of this hook were not measured; expected some of "
        f"{', '.join(costs.hooks)}"
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


def _compared(
    cases: Mapping[str, Case], losses: Mapping[str, tuple[Loss, ...]], compared: str
) -> tuple[HookEstimate, ...]:
    """Return all hooks beside the one that they are compared with, the fastest first."""
    dense = cases[compared]
    rates = sorted({*RATES, dense.link.rate})  # so that the ranges agree with what is said of this rate
    baseline, seconds = dense.seconds(rates), dense.time().seconds
    found = []
    for hook, case in cases.items():
        time = case.time()
        found.append(
            HookEstimate(
                hook=hook,
                time=time,
                speed_up=seconds / time.seconds,
                pays_between=() if hook == compared else paying_rates(dense, case, rates, baseline),
                on_faster_link=case.time(FASTER * case.link.rate).seconds,
                losses=losses[hook],
                is_baseline=hook == compared,
            )
        )
    return tuple(sorted(found, key=lambda one: one.time.seconds))
