"""Laws of one exchange: who gets which mean, of which gradients, and what is seen of those that are not finite."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from commhooks.language.compressor import Compressor
from commhooks.language.loss import Sends
from commhooks.testing.bounds import IN_FLOAT64, of_mean, unit_roundoff
from commhooks.testing.claims import SHAPES, Claims, every_one_in
from commhooks.testing.differences import difference
from commhooks.testing.law import idle, keeping_nothing, law, sharing
from commhooks.testing.waiting import Waits
from commhooks.testing.workers import BrokenLawError, Workers, largest, normal, shape_of, zeros
from commhooks.wrappers import WireDtype

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ODD = (((1,),), ((0,), (3, 0), (4, 4)), ((),), ((1, 200), (200, 1)), ((17, 31), (13,)))
"""Shapes of parameters that no real model combines, and that must work nevertheless."""
SUMS = {"all-reduce", "reduce-scatter"}
"""The kinds of collectives that add up."""


def where(workers: Workers, index: int, step: int | None = None, rank: int | None = None) -> str:
    """Return a description of a parameter, with the step and the rank."""
    parameter = workers.parameters[index]
    dtype = str(parameter.dtype).removeprefix("torch.")
    at = "" if step is None else f" in step {step}"
    on = "" if rank is None else f" on rank {rank}"
    return f"a {dtype} parameter of shape {shape_of(parameter)}{at}{on}, with {workers.world_size} workers"


def require_equal(workers: Workers, step: int, ours: Sequence[Tensor], theirs: Sequence[Tensor], what: str) -> None:
    """Raise `BrokenLawError` unless the means of all parameters are the same, bit for bit; NaN is NaN."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if not torch.equal(one.nan_to_num(0.125), other.nan_to_num(0.125)):
            raise BrokenLawError(f"{what}: {where(workers, index, step)}")


def require_alike(
    claims: Claims, workers: Workers, step: int, ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> None:
    """Raise `BrokenLawError` unless float64 means are equal: bit for bit, but for products, which round by place."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if largest(one - other) > (largest(other) * IN_FLOAT64 if claims.rank else 0.0):
            raise BrokenLawError(f"the means differ for {where(workers, index, step)}")


@law(
    "replicas",
    causes="a sum over ranks that is not in rank order; random numbers that depend on the rank; a mean made of this "
    "rank's own gradient",
    excuse=idle,
)
def replicas(compressor: Compressor, claims: Claims) -> None:
    """Replicas agree bit for bit, with 1, 2, 3 and 8 workers."""
    for world_size in (1, 2, 3, 8):
        workers = Workers(compressor, world_size, zeros(*claims.shapes(*SHAPES)))
        for step in range(4):
            means = workers.step(normal(workers.parameters, world_size, seed=step))
            for rank in range(1, world_size):
                require_equal(workers, step, means[rank], means[0], f"ranks 0 and {rank} have different means")


def losing(compressor: Compressor, claims: Claims) -> str:
    """Excuse a compressor that may lose something of every parameter, or that exchanges nothing."""
    if reason := idle(compressor, claims):
        return reason
    parameters = zeros(*claims.shapes(*SHAPES))
    is_lost = [compressor.loss(f"layer{i}", one) for i, one in enumerate(parameters) if one.numel()]
    return "" if None in is_lost else "it declares a `loss` for every parameter"


@law(
    "mean",
    causes="a sum that is not divided by the number of ranks (`average=True` divides), or is divided twice; elements, "
    "slots or buckets that are left out; clipping; a narrower dtype on the way. If something is to be lost, `loss` "
    "declares how much",
    excuse=losing,
)
def exact_mean(compressor: Compressor, claims: Claims) -> None:
    """Of parameters for which no `loss` is declared, the mean comes back, up to rounding."""
    wires = [one.dtype for one in every_one_in(compressor) if isinstance(one, WireDtype)]
    runs = [(world_size, 1.0, torch.float32) for world_size in (1, 2, 3, 8)] + [(3, 1.0, torch.bfloat16)]
    if not (wires or claims.range):
        runs += [(size, scale, torch.float32) for size in (1, 2) for scale in (1e-30, 1e30)]
    for world_size, scale, dtype in runs:
        workers = Workers(compressor, world_size, zeros(*claims.shapes(*SHAPES), dtype=dtype), buckets=3)
        named = zip(workers.names, workers.parameters, strict=True)
        whole = [index for index, (name, p) in enumerate(named) if compressor.loss(name, p) is None]
        rounded = 16 * sum(of_mean(world_size, one) for one in (torch.float32, *wires)) + 2 * unit_roundoff(dtype)
        for step, alike in ((0, ""), (1, "equal "), (1000, "")):
            workers.step_number = step
            gradients = normal(workers.parameters, world_size, seed=step, scale=scale)
            if alike:
                gradients = [gradients[0]] * world_size
            means = workers.step(gradients)
            for rank, index in itertools.product(range(world_size), whole):
                own = [of_rank[index].double() for of_rank in gradients]
                if off := difference(means[rank][index].double(), own, rounded * largest(*own)):
                    raise BrokenLawError(
                        f"of {alike}gradients of {scale:g}, {off}: {where(workers, index, step, rank)}"
                    )


@law(
    "equal",
    causes="a sum that is not divided by the number of ranks, or is divided twice; a sum in fp16 that is divided "
    "afterwards, or in another dtype that cannot hold it (`average=True` divides first)",
    excuse=idle,
)
def equal_gradients(compressor: Compressor, claims: Claims) -> None:
    """Equal gradients on 8 ranks have about the mean that they have on one, and it is finite if that is."""
    for dtype in (torch.float32, torch.float16):
        alone, together = (Workers(compressor, size, zeros(*claims.shapes(*SHAPES), dtype=dtype)) for size in (1, 8))
        (gradients,) = normal(alone.parameters, 1, seed=0)
        for gradient in gradients:
            gradient.view(-1)[:1] = 20_000
        ours, theirs = alone.step([gradients])[0], together.step([gradients] * 8)[0]
        for index, (gradient, one, of_8) in enumerate(zip(gradients, ours, theirs, strict=True)):
            if not one.isfinite().all():  # ranks may draw other numbers, so nothing is known of the others
                continue
            if not of_8.isfinite().all():
                raise BrokenLawError(f"the mean of up to 20,000 is not finite: {where(together, index)}")
            along, along_of_8 = (float(gradient.double().flatten() @ mean.double().flatten()) for mean in (one, of_8))
            times = along_of_8 / along if along else math.nan
            # What is clipped by the number of ranks may differ by its root; a few random numbers, by more.
            if one.numel() >= 100 and along and not 8**-0.75 < times < 8**0.75:
                raise BrokenLawError(f"it is {times:.3g} times as large: {where(together, index)}")


@law(
    "waits",
    causes="`.item()`, `.tolist()`, `.numpy()`, `if tensor:`, an index that is a mask: compute with tensors instead, "
    "as by `torch.where`. If it is for CPUs alone, declare that as `exempt`",
)
def waits(compressor: Compressor, claims: Claims) -> None:
    """No step asks for a value, for which the host waits on a GPU."""
    workers = Workers(compressor, 2, zeros(*claims.shapes(*SHAPES)))
    with Waits() as found:
        for step in range(2):
            workers.step(normal(workers.parameters, 2, seed=step))
    if found.places:
        raise BrokenLawError(f"the host waits at {found.places[0]}")


@law(
    "repeats",
    causes="a global random generator (draw by `seeded_places` or a `torch.Generator`, seeded by `stable_seed`), a "
    "clock, or a plain attribute as memory",
)
def repeats(compressor: Compressor, claims: Claims) -> None:
    """The same gradients give the same bits when the run is repeated, and no global random generator is used."""
    runs = []
    state = random.getstate()
    try:
        for seed in (1, 2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                random.seed(seed)
                before = _generators()
                workers = Workers(compressor, 2, zeros(*claims.shapes(*SHAPES)))
                runs.append([workers.step(normal(workers.parameters, 2, seed=step))[0] for step in range(3)])
                if used := [name for name, state in _generators().items() if state != before[name]]:
                    raise BrokenLawError(f"the global random generator of {used[0]} was used or seeded by a step")
    finally:
        random.setstate(state)
    for step, (ours, theirs) in enumerate(zip(*runs, strict=True)):
        require_equal(workers, step, ours, theirs, "two runs have different means")


def _generators() -> dict[str, object]:
    """Return the states of the process's random generators, by the library that they belong to."""
    numpys = str(np.random.get_state())  # noqa: NPY002 - read, to see whether somebody else has used it
    return {"PyTorch": torch.get_rng_state().tolist(), "NumPy": numpys, "Python": random.getstate()}


@law(
    "buckets",
    causes="seeding by `bucket.index`; sums, scales and products across slots",
    excuse=sharing,
)
def buckets(compressor: Compressor, claims: Claims) -> None:
    """Under "fused" the mean does not depend on how parameters are dealt to buckets."""
    for world_size in (2, 4):
        one, many = (
            Workers(
                compressor,
                world_size,
                zeros(*claims.shapes(*SHAPES), dtype=torch.float64),
                buckets=number,
                policy="fused",
            )
            for number in (1, 4)
        )
        for step in range(4):
            gradients = normal(one.parameters, world_size, seed=step)
            require_alike(claims, one, step, one.step(gradients)[0], many.step(gradients)[0])


@law(
    "bytes",
    causes="a part whose layout does not list its elements, or names another parameter: make parts with `slot.part`; "
    "`sends` not overridden by a compressor that gathers (`sends = Sends.ANYTHING`)",
)
def bytes_by_parameter(compressor: Compressor, claims: Claims) -> None:
    """The bytes counted for parameters add up to the bytes sent, each parameter's to its own."""
    for policy in ("fifo", "fused"):
        workers = Workers(compressor, 3, zeros(*claims.shapes(*SHAPES)), buckets=3, policy=policy)
        for step in range(2):
            means = workers.step(normal(workers.parameters, 3, seed=step))
        by_parameter = workers.ledger.by_parameter()
        # Messages of bytes are padded to the width of their widest elements; padding belongs to no parameter.
        padding = 0 if compressor.sends < Sends.ANYTHING else 3 * workers.traffic.collectives
        payload, moved = workers.traffic.payload_bytes, workers.traffic.moved_bytes
        counted = sum(one.payload_bytes for one in by_parameter.values())
        counted_moved = sum(one.moved_bytes for one in by_parameter.values())
        if abs(counted - payload) > 8 + padding or abs(counted_moved - moved) > 16 + 2 * padding:
            raise BrokenLawError(
                f"parameters are counted to send {counted:.0f} bytes, and {payload} are sent, under {policy}"
            )
        for index, (name, parameter) in enumerate(zip(workers.names, workers.parameters, strict=True)):
            one = by_parameter[name]
            if (one.steps, one.gradient_bytes) != (2, 2 * 4 * parameter.numel()):
                raise BrokenLawError(f"of {where(workers, index)}, {one.steps} of 2 steps are counted")
            if claims.exchanges and not one.payload_bytes and means[0][index].any():
                raise BrokenLawError(f"a mean has come, and no byte is counted as sent: {where(workers, index)}")
        if workers.asked_for - SUMS and compressor.sends < Sends.ANYTHING:
            kinds = ", ".join(sorted(workers.asked_for - SUMS))
            raise BrokenLawError(f"an {kinds} was asked for, and `sends` declares sums only")


@law(
    "place",
    causes="a mean that is written into `slot.gradient` instead of passed to `slot.write`",
)
def place(compressor: Compressor, claims: Claims) -> None:
    """The mean goes where its bucket says, also if that is not the gradient's memory."""
    for dtype in (torch.float32, torch.bfloat16):
        parameters = zeros(*claims.shapes(*SHAPES), dtype=dtype)
        here, apart = (
            Workers(compressor, 2, parameters, buckets=2, policy="fused", apart=where) for where in (False, True)
        )
        for step in range(3):
            gradients = normal(parameters, 2, seed=step)
            for ours, theirs in zip(here.step(gradients), apart.step(gradients), strict=True):
                require_equal(here, step, ours, theirs, "the mean is another elsewhere")
        for one, other in zip(here.states, apart.states, strict=True):
            for index, parameter in enumerate(parameters):
                kept, there = one.of(parameter).tensors, other.of(parameter).tensors
                if kept.keys() != there.keys() or not all(torch.equal(kept[name], there[name]) for name in kept):
                    raise BrokenLawError(f"what is remembered is another for {where(here, index)}")


@law(
    "memory",
    causes="a view of `M` kept for the next step; state that is a view of the bucket",
    excuse=idle,
)
def memory(compressor: Compressor, claims: Claims) -> None:
    """The memory of a step's gradients may be overwritten once the mean is there."""
    parameters = zeros(*claims.shapes((24, 40), (6,)))
    ours, theirs = (Workers(compressor, 2, parameters) for _ in range(2))
    for step in range(3):
        gradients = normal(parameters, 2, seed=step)
        require_equal(ours, step, ours.step(gradients)[0], theirs.step(gradients)[0], "the old memory is still used")
        for one in ours.memories:
            one.fill_(torch.nan)


@law(
    "shapes",
    causes="reshaping by `parameter.shape` or `len(parameter)`, which a 0-dim one has not (use `numel()`); a division "
    "by a norm or a number of elements that is 0 (use `bucket.filled`); a dtype that is not the gradient's",
)
def shapes(compressor: Compressor, claims: Claims) -> None:
    """Parameters of any shape, 0-dim and empty ones too, have finite means in fp16, bf16, fp32 and fp64."""
    for dtype, own in [*itertools.product(DTYPES, ODD)]:
        workers = Workers(compressor, 2, zeros(*own, dtype=dtype))
        gradients = normal(workers.parameters, 2, seed=5)
        for step in range(2):
            for index, mean in enumerate(workers.step(gradients)[0]):
                if not torch.isfinite(mean).all():
                    raise BrokenLawError(f"a mean that is not finite, of {where(workers, index, step)}")


@law(
    "zeros",
    causes="a division by a scale or norm that is 0; codes that have no zero (declare that as `exempt`)",
    excuse=idle,
)
def zeros_stay_zero(compressor: Compressor, claims: Claims) -> None:
    """The mean of zeros is zero."""
    workers = Workers(compressor, 2, zeros(*claims.shapes((24, 40), (24, 40), (5,))))
    silence = [[torch.zeros_like(p) for p in workers.parameters] for _ in range(2)]
    for step in range(3):
        for index, mean in enumerate(workers.step(silence)[0]):
            if mean.any():
                raise BrokenLawError(f"a mean of {float(mean.abs().amax()):.3g}, of {where(workers, index, step)}")


@law(
    "flaws",
    causes="judging too little: a bad element that is not sent needs a number that shows it; integers and packed bits "
    "are always finite, so their scale must be judged (a codec whose codes cannot show it: `shows_non_finite = "
    "False`); state written before `Judge`, or a finite mean under a "
    "false verdict (add `torch.where(finite, 0.0, torch.nan)`)",
    excuse=idle,
)
def flaws(compressor: Compressor, claims: Claims) -> None:
    """An inf or a NaN on one rank shows on every rank, and commits nothing."""
    parameters = zeros(*claims.shapes((24, 40), (6,)))
    workers, undisturbed = (Workers(compressor, 3, parameters) for _ in range(2))
    for step in range(3):
        workers.step(normal(parameters, 3, seed=step))
        undisturbed.step(normal(parameters, 3, seed=step))
    for number, (index, bad) in enumerate(itertools.product((0, 1, -1), (math.inf, -math.inf, math.nan))):
        workers.step_number = undisturbed.step_number = 3
        spoiled = normal(parameters, 3, seed=99)
        spoiled[1][index].view(-1)[3] = bad
        for rank, means in enumerate(workers.step(spoiled)):
            if all(torch.isfinite(mean).all() for mean in means):
                raise BrokenLawError(
                    f"all means are finite on rank {rank}, with {bad} on rank 1 in {where(workers, index)}"
                )
        undisturbed.step_number += 1  # a basis drawn anew every step is another one in the next
        after = normal(parameters, 3, seed=100 + number)
        what = f"the step after one with {bad} on rank 1 is another than without it"
        require_equal(workers, 4, workers.step(after)[0], undisturbed.step(after)[0], what)


@law(
    "overflow",
    causes="a mean that is judged in fp32: judge `tile.in_own_range(means)` besides",
    excuse=keeping_nothing,
)
def overflow(compressor: Compressor, claims: Claims) -> None:
    """A mean that fp16 cannot hold commits nothing."""
    parameters = zeros(*claims.shapes((24, 40), (6,)), dtype=torch.float16)
    workers, indices = Workers(compressor, 2, parameters), range(len(parameters))
    for step in range(3):
        workers.step(normal(parameters, 2, seed=step))
    skips = 0
    for seed in range(12):  # what is not sent of such gradients adds up
        before = [[workers.residual(rank, index).clone() for index in indices] for rank in range(2)]
        large = [[g.sign() * 60_000 for g in rank] for rank in normal(parameters, 2, seed=seed)]
        means = workers.step(large)
        skipped = not all(torch.isfinite(mean).all() for mean in means[0])
        skips += skipped
        for rank, index in itertools.product(range(2), indices) if skipped else ():
            if not torch.equal(workers.residual(rank, index), before[rank][index]):
                raise BrokenLawError(f"the residual has changed, of {where(workers, index, 3 + seed, rank)}")
    if not claims.is_derived and bool(skips) is not claims.overshoots:
        raise BrokenLawError(f"means overflow in {skips} of 12 steps")
    workers = Workers(compressor, 2, parameters)
    workers.step(normal(parameters, 2, seed=100))
    if not torch.isfinite(workers.step(normal(parameters, 2, seed=101))[0][0]).all():
        raise BrokenLawError("a mean of ordinary gradients is not finite in fp16")


@law(
    "together",
    causes="state written before `Judge`, or without its verdict; `keep` not called",
    excuse=keeping_nothing,
)
def together(compressor: Compressor, claims: Claims) -> None:
    """Under "fused" an inf in one bucket commits nothing in any."""
    parameters = zeros((24, 40), (6,), (30, 20), *claims.shapes((24, 40)))
    workers, indices = Workers(compressor, 2, parameters, buckets=4, policy="fused"), range(len(parameters))
    for step in range(3):
        workers.step(normal(parameters, 2, seed=step))
    before = [[workers.residual(rank, index).clone() for index in indices] for rank in range(2)]
    spoiled = normal(parameters, 2, seed=99)
    spoiled[1][1][3] = float("inf")
    workers.step(spoiled)
    for rank, index in itertools.product(range(2), indices):
        if not torch.equal(workers.residual(rank, index), before[rank][index]):
            raise BrokenLawError(f"the residual has changed, of {where(workers, index, 3, rank)}")
    workers.step(normal(parameters, 2, seed=100))
    if all(torch.equal(workers.residual(0, index), before[0][index]) for index in indices):
        raise BrokenLawError("no residual changes in the next step, which is finite")


@law(
    "scales",
    causes="scales in fp16; squares that overflow (divide by the largest magnitude first); a constant added to a "
    "divisor, which is larger than the gradient",
    excuse=idle,
)
def scales(compressor: Compressor, claims: Claims) -> None:
    """Gradients of 1e-30 and 1e30 have finite means, or every rank sees that they have not."""
    for scale in (1e-30, 1e30):
        workers = Workers(compressor, 2, zeros(*claims.shapes((24, 40), (24, 40))))
        fits = scale < torch.finfo(claims.range or torch.float32).max
        may_not_fit = claims.is_derived and scale > 1
        for step in range(4):
            means = workers.step(normal(workers.parameters, 2, seed=step, scale=scale))
            for index, (ours, first) in enumerate(zip(means[1], means[0], strict=True)):
                at = f"of gradients of {scale:g}, for {where(workers, index, step)}"
                here, there = (bool(torch.isfinite(mean).all()) for mean in (ours, first))
                if here is not there or (here is not fits and not may_not_fit):
                    raise BrokenLawError(f"a mean that is {'' if here else 'not '}finite {at}")
                if here and not torch.equal(ours, first):
                    raise BrokenLawError(f"ranks 0 and 1 have different means {at}")


LAWS = (
    replicas,
    exact_mean,
    equal_gradients,
    waits,
    repeats,
    buckets,
    bytes_by_parameter,
    place,
    memory,
    shapes,
    zeros_stay_zero,
    flaws,
    overflow,
    together,
    scales,
)
"""The laws of this file, in the order in which they are tried."""
