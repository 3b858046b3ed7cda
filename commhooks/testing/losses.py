"""Laws of `Loss`: what a step leaves out is no more than declared, and a mean that is to be unbiased is.

A compressor is measured by itself, on one worker: what it leaves unsent of a gradient is then its residual after one
step, if it has one, and otherwise the difference between gradient and mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commhooks.compressors.two_hop import TwoHop
from commhooks.language.compressor import Compressor, inner_of
from commhooks.language.loss import Loss
from commhooks.testing.claims import Claims
from commhooks.testing.law import law
from commhooks.testing.workers import BrokenLawError, Workers, shape_of, zeros
from commhooks.wrappers import ErrorFeedback

DRAWS = 64
"""The number of steps in which an input is tried, each with its own random numbers."""
SIGMAS = 6.0
"""The number of standard errors by which a measured mean error may exceed the declared one. A normally distributed mean
does so once in 1e9, and the inputs are the same in every run, so a verdict never changes."""
UNSEEN = 14.0
"""If this many events of a kind are expected in all draws, the probability of seeing none is one in a million."""
MANY = ("normal", "equal", "alternating", "sparse", "between levels", "a ramp")
"""Inputs in which many elements count alike: a sum of their errors is nearly normally distributed, and its spread is
seen. Where one element counts for most, an event that is too rare to be seen would look like a bias."""
_ROUNDING = 1e-5
"""A relative tolerance, for fp32's rounding of measured values."""
_TRIES, _TRIED = 24, 6
"""Changes of an input that the search makes, and the draws that compare one with the last."""
_FADING = 1e-9


class Measured(NamedTuple):
    """The unsent parts of one input, over several draws."""

    ratios: Tensor
    """|unsent|² / |gradient|², [draws]."""
    largest: float
    """The largest of (|unsent|∞ / |gradient|∞)²."""
    errors: Tensor
    """mean - gradient, [draws, elements]."""

    @property
    def proven(self) -> float:
        """The error that is certain: the ratios' mean, less `SIGMAS` of its standard errors, and what was not seen.

        An event that occurs in a fraction p of all draws stays unseen in n of them with a probability of at most
        exp(-p·n), for p = `UNSEEN`/n once in a million; such an event may leave nothing unsent.
        """
        n = len(self.ratios)
        unseen = UNSEEN / n if n == DRAWS else 0.0  # fewer draws than that: they are all alike
        return float(self.ratios.mean() * (1 - unseen) - SIGMAS * self.ratios.std() / math.sqrt(n))


def inputs(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return gradients of a shape, each hard for some code, by name; fp32."""
    n = math.prod(shape)
    drawn = torch.Generator().manual_seed(11)
    normals = torch.randn(n, generator=drawn, dtype=torch.float32, device="cpu")
    uniform = torch.rand(n, generator=drawn, dtype=torch.float32, device="cpu")
    numbers = torch.arange(n, dtype=torch.float32, device="cpu")
    alternating = 1.0 - 2.0 * (numbers % 2)
    sparse = torch.where(uniform < 0.05, normals, 0.0)
    spike = torch.zeros_like(normals)
    spike[n // 3] = -2.0
    peak = torch.full_like(normals, 0.5)
    peak[0] = 1.0
    found = {
        "normal": normals,
        "equal": torch.ones_like(normals),
        "alternating": alternating,
        "sparse": sparse,
        "a spike": spike,
        "a spike among small ones": spike + 1e-3 * normals,
        "heavy tails": normals / uniform.clamp(min=1e-3),
        "powers of two": alternating * 2.0 ** -(numbers % 12),
        "tiny": 1e-30 * normals,
        "between levels": peak * alternating,
        "a ramp": torch.linspace(0, 1, n, dtype=torch.float32, device="cpu"),
    }
    peaks = numbers % 32 == 0
    for size in (0.17, 0.03, 0.004):  # half a level of 2, 16 and 127
        found[f"peaks among {size:g}"] = torch.where(peaks, 1.0, size * alternating)
    return {name: values.view(shape) for name, values in found.items()}


def measured_alone(compressor: Compressor) -> Iterator[Compressor]:
    """Yield the compressors in a nest that have a loss of their own, without their error feedback."""
    if isinstance(compressor, TwoHop):
        yield dataclasses.replace(compressor, server_feedback=False)
        return
    inner = inner_of(compressor)
    if not inner:
        yield compressor
    for one in inner:
        yield from measured_alone(one)


class Bench:
    """One worker on which a compressor's losses are measured, for several gradients at once.

    They share a bucket, unless what one loses depends on the others.
    """

    def __init__(self, compressor: Compressor, gradients: Sequence[Tensor]) -> None:
        self.gradients: list[Tensor] = [gradient.clone() for gradient in gradients]
        parameters = [torch.zeros_like(gradient) for gradient in gradients]
        losses = [compressor.loss(f"layer{index}", parameter) for index, parameter in enumerate(parameters)]
        self.is_kept: bool = any(loss is not None and loss.is_kept for loss in losses)
        is_apart = "buckets" in compressor.exempt or any(loss is not None and loss.of_bucket for loss in losses)
        if self.is_kept:
            compressor = ErrorFeedback(inner=compressor, decay=_FADING)
        self.workers: Workers = Workers(compressor, 1, parameters, buckets=len(parameters) if is_apart else 1)

    def draw(self) -> list[tuple[Tensor, Tensor]]:
        """Make a step; return for each gradient what was not sent, and the mean."""
        (means,) = self.workers.step([self.gradients])
        if self.is_kept:
            residuals = [self.workers.residual(0, index) for index in range(len(means))]
            unsent = [residual.clone() for residual in residuals]
            for residual in residuals:  # none comes back: each step leaves out what the first one does
                residual.zero_()
        else:
            unsent = [gradient - mean for gradient, mean in zip(self.gradients, means, strict=True)]
        return list(zip(unsent, means, strict=True))

    def is_random(self, of_steps: Sequence[list[tuple[Tensor, Tensor]]]) -> bool:
        """Return True if steps differ, so that more of them are worth measuring."""
        first, *others = of_steps
        return not all(torch.equal(one, own) for step in others for (one, _), (own, _) in zip(step, first, strict=True))

    def measure(self, draws: int) -> list[Measured]:
        """Measure the unsent part of each gradient in `draws` steps, or in a few if these leave the same."""
        of_steps = [self.draw() for _ in range(_TRIED // 2)]
        if self.is_random(of_steps):
            of_steps += [self.draw() for _ in range(draws - len(of_steps))]
        found = []
        for gradient, pairs in zip(self.gradients, zip(*of_steps, strict=True), strict=True):
            whole = gradient.double().flatten()
            unsent = torch.stack([kept.double().flatten() for kept, _ in pairs])
            means = torch.stack([mean.double().flatten() for _, mean in pairs])
            largest = float(unsent.abs().amax() / whole.abs().amax()) ** 2
            found.append(Measured(unsent.square().sum(1) / whole.square().sum(), largest, means - whole))
        return found

    def search(self) -> None:
        """Change each gradient, a little or much at a time, to one of which more is left unsent."""
        drawn = torch.Generator().manual_seed(12)
        best = [float(one.ratios.mean()) for one in self.measure(_TRIED)]
        for number in range(_TRIES):
            old = [gradient.clone() for gradient in self.gradients]
            self.gradients = [_changed(gradient, number, drawn) for gradient in old]
            for index, one in enumerate(self.measure(_TRIED)):
                ratio = float(one.ratios.mean())
                if ratio > best[index]:
                    best[index] = ratio
                else:
                    self.gradients[index] = old[index]


def _changed(gradient: Tensor, number: int, drawn: torch.Generator) -> Tensor:
    """Return a gradient with some elements replaced: by zeros, by multiples of others, by noise, or by one value."""
    flat = gradient.flatten().clone()
    some = torch.empty_like(flat).uniform_(generator=drawn) < (0.5, 0.1, 0.02)[number % 3]
    if number % 4 == 0:
        flat[some] = 0.0
    elif number % 4 == 1:
        flat[some] *= 2.0 ** float(torch.empty_like(flat[:1]).random_(-4, 5, generator=drawn))
    elif number % 4 == 2:
        flat += flat.abs().amax() * 0.3 * torch.empty_like(flat).normal_(generator=drawn) * some
    else:
        flat[some] = flat.abs().amax() * float(torch.empty_like(flat[:1]).uniform_(generator=drawn))
    return flat.view_as(gradient) if flat.any() else gradient


def lossless(compressor: Compressor, claims: Claims) -> str:
    """Excuse a compressor whose losses cannot be measured."""
    if not claims.exchanges:
        return "it exchanges nothing"
    alone = list(measured_alone(compressor))
    losses = [one.loss("layer0", zeros(shape)[0]) for one in alone for shape in claims.shapes((24, 40))]
    found = [loss for loss in losses if loss is not None]
    if not found:
        return "it declares no `loss`, so nothing may be lost"
    if all(math.isinf(loss.error) or not (loss.is_kept or loss.unbiased) for loss in found):
        return "what it leaves out is not kept by `slot.keep`, so it cannot be measured"
    return ""


def biased(compressor: Compressor, claims: Claims) -> str:
    """Excuse a compressor that does not say that its mean is unbiased."""
    parameter = zeros(claims.shapes((24, 40))[-1])[0]
    losses = [one.loss("layer0", parameter) for one in measured_alone(compressor)]
    return "" if any(loss is not None and loss.unbiased for loss in losses) else "it is not declared unbiased"


@law(
    "loss",
    causes="a `loss` or `relative_error` taken from random inputs, not from the worst; a bound of the largest element "
    "taken for one of the norm (that is `in_another_norm`, or `contraction` of a codec)",
    excuse=lossless,
)
def loss_is_enough(compressor: Compressor, claims: Claims) -> None:
    """A step leaves out no more of any gradient than `loss` says."""
    for one in measured_alone(compressor):
        hard = {name: values for shape in claims.shapes((24, 40))[-1:] for name, values in inputs(shape).items()}
        if claims.range == torch.float16:  # what is too small for it becomes 0, which a `loss` does not count
            del hard["tiny"]
        hard |= {f"normal, {shape}": inputs(shape)["normal"] for shape in ((40,), (64, 33), (3, 5, 3, 3), (1, 7), ())}
        bench = Bench(one, list(hard.values()))
        named = zip(hard, bench.workers.names, bench.workers.parameters, strict=True)
        declared = {name: one.loss(layer, parameter) for name, layer, parameter in named}
        for is_searched in (False, True):
            if is_searched:
                bench.search()
            for index, ((name, loss), found) in enumerate(zip(declared.items(), bench.measure(DRAWS), strict=True)):
                _require_enough(loss, found, f"{name}, changed" if is_searched else name, bench.gradients[index])


def _require_enough(loss: Loss | None, found: Measured, name: str, gradient: Tensor) -> None:
    loss = loss or Loss(0.0)
    if math.isinf(loss.error) or not (loss.is_kept or loss.unbiased):
        return
    what = f"a gradient of shape {shape_of(gradient)} ({name})"
    if found.proven > loss.error * (1 + _ROUNDING) + _ROUNDING**2:
        raise BrokenLawError(
            f"{float(found.ratios.mean()):.3g} of {what} is left out, in squared norms, and {loss.error:.3g} declared"
        )
    if loss.contraction < loss.error * (1 - _ROUNDING) and found.largest > loss.contraction * (1 + _ROUNDING):
        raise BrokenLawError(
            f"an element of {what} is off by {math.sqrt(found.largest):.3g} of the largest magnitude, and "
            f"{math.sqrt(loss.contraction):.3g} is declared"
        )


@law(
    "unbiased",
    causes="rounding to the nearest number instead of at random; noise of another range than from 0 to 1; clamping; "
    "random numbers that are used twice; a damping factor",
    excuse=biased,
)
def unbiased(compressor: Compressor, claims: Claims) -> None:
    """A mean that is declared unbiased is the gradients' mean on average over the random numbers.

    Project the errors on directions, each of which is chosen without the draws that are then tested.

    Were the errors' mean zero, so would be that of any projection; it is no further from it than `SIGMAS` standard
    errors. A direction is that of the gradient (damping), of its signs and of ones (rounding up or down), and of the
    mean error of other draws, which a bias of any kind has a part in.
    """
    for one in measured_alone(compressor):
        found = inputs(claims.shapes((24, 40))[-1])
        hard = {name: found[name] for name in MANY}
        bench = Bench(one, list(hard.values()))
        losses = [one.loss(name, p) for name, p in zip(bench.workers.names, bench.workers.parameters, strict=True)]
        if not any(loss is not None and loss.unbiased for loss in losses):
            continue
        first, second = bench.measure(2 * DRAWS), bench.measure(4 * DRAWS)
        for name, gradient, own, other in zip(hard, bench.gradients, first, second, strict=True):
            whole = gradient.double().flatten()
            for direction in (whole, whole.sign(), torch.ones_like(whole), own.errors.mean(0)):
                along = other.errors @ (direction / direction.norm().clamp(min=1e-300))
                bias, spread = float(along.mean()), float(along.std() / math.sqrt(len(along)))
                if abs(bias) > SIGMAS * spread + _ROUNDING * float(whole.norm()):
                    raise BrokenLawError(
                        f"over {len(along)} draws the mean of a gradient of shape {shape_of(gradient)} ({name}) is off "
                        f"by {abs(bias) / float(whole.norm()):.2g} of its norm, {abs(bias) / max(spread, 1e-300):.0f} "
                        "standard errors"
                    )


LAWS = (loss_is_enough, unbiased)
"""The laws of this file, in the order in which they are tried."""
