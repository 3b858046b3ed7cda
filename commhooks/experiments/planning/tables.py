"""The profile of a model of which only shapes are known, with a stated compute time and measured costs of compression.

    compute        a third forward, two thirds backward, of which each bucket takes its share by elements
    buckets        as a DDP makes them, joined into units as the engine joins them
    payloads       counted: each compressor runs here once on random gradients, as one of the ranks
    compression    of a unit, before round i:  bucket_seconds / (rounds + 1) + copy · Σ cost_i(parameter)

The step without a link is computed by the step-time model, so that a prediction consists of the model alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import nn

from commhooks.engine.units import UNIT_ELEMENTS
from commhooks.errors import SettingsError
from commhooks.experiments.planning.candidates import NOOP, Candidate, default_candidates, with_the_two
from commhooks.experiments.planning.costs import Costs, HookCosts, Shape, copy_seconds
from commhooks.experiments.planning.predicting import step_of
from commhooks.experiments.planning.profiles import (
    BucketProfile,
    GradientProfile,
    HookProfile,
    Profile,
    RoundProfile,
    Seconds,
    StepParts,
)
from commhooks.experiments.timing.link import NoLink
from commhooks.experiments.timing.payloads import rounds_of
from commhooks.experiments.timing.sharded import FORWARD_SHARE
from commhooks.experiments.timing.step_time import Sends, step_time
from commhooks.language.compressor import Compressor
from commhooks.making import compressor_in_file
from commhooks.scheduling.policy import PolicyName

MIB = 2**20
FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB  # of a DDP, unless it is given a size
MATRIX = 1_000_000
"""If only a model's size is known, it is assumed to consist of square matrices with this many elements."""
TABLED: tuple[Candidate | str, ...] = (*default_candidates(), "bf16", "int4")
"""The hooks that are computed unless others are asked for."""
_COUNTED = 8, 16
"""As one of more ranks than the second, payloads follow the power law through what is counted for these two."""


def square_matrices(parameters: float) -> list[Shape]:
    """Return the shapes of equal square matrices of about `MATRIX` elements each, and `parameters` in all."""
    if not 1 <= parameters < math.inf:
        raise SettingsError(f"parameters must be a finite number of at least 1 (got {parameters!r}).")
    count = max(1, round(parameters / MATRIX))
    side = max(1, round(math.sqrt(parameters / count)))
    return [(side, side)] * count


def _shapes_of(model: nn.Module) -> list[Shape]:
    """Return the shapes of the parameters that are trained, in the model's order."""
    shapes = [tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad]
    if not shapes:
        raise SettingsError(f"{type(model).__name__}: the model has no parameter that requires a gradient.")
    return shapes


def in_buckets(shapes: Sequence[Shape], bucket_cap_mb: float | None = None) -> list[tuple[int, ...]]:
    """Return the places of the parameters in each bucket of a DDP, for fp32 gradients.

    The last parameter's gradient is taken to be ready first. A bucket closes when it has reached its limit:
    `bucket_cap_mb` MiB, or by default 1 MiB for the first one and 25 for the others.
    """
    limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES] if bucket_cap_mb is None else [bucket_cap_mb * MIB]
    buckets: list[tuple[int, ...]] = []
    filling: list[int] = []
    filled = 0
    for place in reversed(range(len(shapes))):
        filling.append(place)
        filled += 4 * math.prod(shapes[place])
        if filled >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(tuple(filling))
            filling, filled = [], 0
    return [*buckets, tuple(filling)] if filling else buckets


def in_units(elements: Sequence[int], policy: PolicyName, *, joins: bool) -> list[list[int]]:
    """Return the buckets, of these numbers of elements, that are averaged as one; see `commhooks.engine.units`."""
    units: list[list[int]] = [[]]
    for number in range(len(elements)):
        units[-1].append(number)
        is_full = sum(elements[one] for one in units[-1]) >= UNIT_ELEMENTS[policy]
        if not joins or is_full or (policy == "fifo" and number == 0):
            units.append([])
    return [unit for unit in units if unit]


def ready_moments(elements: Sequence[int], compute: float) -> list[float]:
    """Return the seconds of compute after which buckets with these numbers of elements are ready, one after another.

    The backward pass is two thirds of the compute, and each bucket takes its share of it by elements.
    """
    forward = FORWARD_SHARE * compute
    done = accumulate(elements)
    return [min(compute, forward + part / sum(elements) * (compute - forward)) for part in done]


def profile_from_tables(
    model: float | nn.Module,
    ranks: int,
    *,
    compute: float,
    hooks: Iterable[Candidate | Compressor | str] | None = None,
    cores: int = 1,
    costs: Costs | None = None,
    copy: float | None = None,
) -> Profile:
    """Return a model's profile under hooks whose costs are known, without running any of it.

    Args:
        model: A model, of which only the shapes are read, or its number of parameters.
        ranks: The number of ranks, at least 2.
        compute: Seconds of a step's forward and backward pass and of its optimizer.
        hooks: As for `profile`; None: `default_candidates()`, bf16 and int4.
        cores: The cores of each rank; with 2 or more, compression overlaps the backward pass.
        costs: The costs of compression; None: the package's.
        copy: Seconds in which the processor copies an element of fp32; None: timed here, which takes 0.1 s.

    Raises:
        SettingsError: A hook's costs were not measured, or a value cannot be.

    """
    if not 0 < compute < math.inf:
        raise SettingsError(f"compute must be above zero, in seconds (got {compute!r}).")
    if ranks < 2:
        raise SettingsError(f"ranks must be at least 2 (got {ranks!r}): one rank sends nothing.")
    shapes = _shapes_of(model) if isinstance(model, nn.Module) else square_matrices(model)
    costs = Costs.read() if costs is None else costs
    copy = copy_seconds() if copy is None else copy
    places = in_buckets(shapes)
    elements = [sum(math.prod(shapes[place]) for place in bucket) for bucket in places]
    moments = ready_moments(elements, compute)
    forward = FORWARD_SHARE * compute
    step = StepParts(Seconds(compute, compute, compute), forward, compute - forward, 0.0, 0.0, steps=0)
    profile = Profile(
        model=f"{sum(map(math.prod, shapes)):,} parameters",
        ranks=ranks,
        ddp="core",
        cores=cores,
        plain=step,
        noop=step,
        gradients=tuple(
            GradientProfile(_name(number, place), shapes[place], 4 * math.prod(shapes[place]), ready)
            for number, (bucket, ready) in enumerate(zip(places, moments, strict=True))
            for place in bucket
        ),
        hooks={},
        own_share=0.0,
    )
    found = {}
    for hook in with_the_two(TABLED if hooks is None else hooks):
        units = in_units(elements, hook.policy, joins=hook.compressor.may_join_buckets(0))
        buckets = []
        for unit in units:
            inside = tuple(_name(number, place) for number in unit for place in places[number])
            size = 4 * sum(elements[number] for number in unit)
            buckets.append(BucketProfile(inside, size, moments[unit[-1]], (), 0.0))
        plain = HookProfile(hook.hook, hook.policy, step, tuple(buckets))
        found[hook.label] = plain if hook.label == NOOP else _with_costs(profile, plain, costs, copy)
    return dataclasses.replace(profile, hooks=found)


def as_one_of(profile: Profile, ranks: int, costs: Costs) -> Profile:
    """Return a measured profile as one of another number of ranks.

    Payloads are counted. Compression that follows a gather grows with the ranks as it did when costs were measured; of
    hooks whose costs were not measured it stays.
    """
    if ranks == profile.ranks:
        return profile
    found = {NOOP: profile.hooks[NOOP]}
    for label, hook in profile.hooks.items():
        if label == NOOP:
            continue
        compressor = compressor_in_file(hook.hook)
        known = costs.of(str(compressor))
        buckets, more = [], 0.0
        for bucket, sends in zip(hook.buckets, _sends_of(compressor, _shapes_in(profile, hook), ranks), strict=True):
            seconds = [one.seconds for one in bucket.rounds] + [bucket.after]
            growth = known.growth if known is not None and len(known.growth) == len(seconds) else (0.0,) * len(seconds)
            grown = [
                own * (1 + each * (ranks - 2)) / (1 + each * (profile.ranks - 2))
                for own, each in zip(seconds, growth, strict=True)
            ]
            more += sum(grown) - sum(seconds)
            rounds = tuple(map(RoundProfile, grown[: len(sends)], sends))
            buckets.append(dataclasses.replace(bucket, rounds=rounds, after=sum(grown[len(sends) :])))
        step = hook.step.lasting(hook.step.seconds.median + max(0.0, more))
        found[label] = dataclasses.replace(hook, buckets=tuple(buckets), step=step)
    return dataclasses.replace(profile, ranks=ranks, hooks=found, link="")


def _name(bucket: int, place: int) -> str:
    """Return a made-up name: a bucket's parameters are those of a block, which FSDP2 would shard."""
    return f"blocks.{bucket}.{place}"


def _shapes_in(profile: Profile, hook: HookProfile) -> list[tuple[Shape, ...]]:
    shapes = {gradient.name: gradient.shape for gradient in profile.gradients}
    return [tuple(shapes[name] for name in bucket.parameters) for bucket in hook.buckets]


def _with_costs(profile: Profile, hook: HookProfile, costs: Costs, copy: float) -> HookProfile:
    """Return a hook with the time of its compression, and what it sends."""
    compressor = compressor_in_file(hook.hook)
    own = costs.of(str(compressor))
    if own is None:
        raise SettingsError(
            f"hook {hook.hook!r}: its costs were not measured, so nothing is computed from tables; measure it with "
            f"--task, or take one of {', '.join(costs.hooks)}."
        )
    inside = _shapes_in(profile, hook)
    buckets = []
    for bucket, shapes, rounds in zip(hook.buckets, inside, _sends_of(compressor, inside, profile.ranks), strict=True):
        buckets.append(_bucket_with_costs(bucket, shapes, rounds, own, profile.ranks, copy))
    seconds = step_time(step_of(profile, hook, buckets), NoLink(), profile.ranks).seconds
    return dataclasses.replace(hook, step=hook.step.lasting(seconds), buckets=tuple(buckets))


def _bucket_with_costs(
    bucket: BucketProfile, shapes: Sequence[Shape], rounds: Sequence[Sends], own: HookCosts, ranks: int, copy: float
) -> BucketProfile:
    *before, after = own.seconds(shapes, ranks, copy, len(rounds))
    return dataclasses.replace(bucket, rounds=tuple(map(RoundProfile, before, rounds)), after=after)


def _sends_of(compressor: Compressor, units: Sequence[tuple[Shape, ...]], ranks: int) -> list[tuple[Sends, ...]]:
    """Return each unit's payloads in each round.

    Units of the same shapes are counted once; if all parameters have one shape, one of them is counted for all.
    """
    is_one_shape = len({shape for shapes in units for shape in shapes}) == 1
    counted: dict[tuple[Shape, ...], tuple[Sends, ...]] = {}
    found = []
    for shapes in units:
        key = shapes[:1] if is_one_shape else shapes
        if key not in counted:
            counted[key] = _count(compressor, key, ranks)
        times = len(shapes) // len(key)
        found.append(tuple(tuple((kind, times * payload) for kind, payload in sends) for sends in counted[key]))
    return found


def _count(compressor: Compressor, shapes: Sequence[Shape], ranks: int) -> tuple[Sends, ...]:
    """Return the payloads of one unit as one of this many ranks."""
    generator = torch.Generator()

    def of(number: int) -> tuple[Sends, ...]:
        generator.manual_seed(0)
        gradients = {
            str(place): torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            for place, shape in enumerate(shapes)
        }
        return rounds_of(compressor, gradients, number)

    few, many = _COUNTED
    if ranks <= many:
        return of(ranks)
    low, high = of(few), of(many)
    if [[kind for kind, _ in sends] for sends in low] != [[kind for kind, _ in sends] for sends in high]:
        return high  # other collectives among more ranks
    return tuple(
        tuple(
            (kind, round(own * (own / max(1, other)) ** (math.log(ranks / many) / math.log(many / few))))
            for (kind, own), (_, other) in zip(mine, others, strict=True)
        )
        for mine, others in zip(high, low, strict=True)
    )
