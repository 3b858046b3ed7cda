"""The profile of a model of which only shapes are known, with a stated compute time and measured costs of compression.

    compute        a third forward, two thirds backward, of which each bucket takes its share by elements
    buckets        as a DDP makes them
    payloads       counted: each compressor runs here once on random gradients, as one of the ranks
    compression    of a bucket, before round i:  bucket_seconds / (rounds + 1) + copy · Σ cost_i(parameter)

The step without a link is computed by the step-time model, so that a prediction consists of the model alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from commhooks.language.compressor import Compressor
from commhooks.making import compressor_in_file

from .candidates import NOOP, label_in_profile
from .costs import HookCosts
from .payloads import is_padded, rounds_of
from .predicting import NoLink, step_of
from .profiles import (
    BucketProfile,
    GradientProfile,
    HookProfile,
    Profile,
    RoundProfile,
    Seconds,
    Sends,
    StepParts,
)
from .sizes import FORWARD_SHARE, Shape, in_buckets, ready_moments
from .step_time import step_time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stated:
    """A model, and what a rank takes for its step without communication."""

    shapes: Sequence[Shape]
    """The shapes of its parameters, in the model's order."""
    compute: float
    """Seconds of the forward and the backward pass."""
    optimizer: float = 0.0
    """Seconds."""
    cores: int = 1
    bucket_cap_mb: float | None = None
    """The DDP's bucket size, in MiB; None: its default."""
    are_alike: bool = False
    """True if all parameters have the same shape, so that one is counted for all."""

    def profile(self, costs: Mapping[str, HookCosts], ranks: int, copy: float) -> Profile:
        """Return the model's profile under hooks of known costs, on a processor that copies an element in `copy` s."""
        places = in_buckets(self.shapes, self.bucket_cap_mb)
        elements = [sum(math.prod(self.shapes[place]) for place in bucket) for bucket in places]
        moments = ready_moments(elements, self.compute)
        plain = tuple(
            BucketProfile(tuple(map(str, bucket)), 4 * size, ready, (), 0.0)
            for bucket, size, ready in zip(places, elements, moments, strict=True)
        )
        whole = self.compute + self.optimizer
        forward = FORWARD_SHARE * self.compute
        step = StepParts(Seconds(whole, whole, whole), forward, self.compute - forward, 0.0, self.optimizer, steps=0)
        profile = Profile(
            model=f"{sum(map(math.prod, self.shapes)):,} parameters",
            fingerprint="",
            ranks=ranks,
            ranks_per_host=1,
            ddp="core",
            cores=self.cores,
            plain=step,
            noop=step,
            gradients=tuple(
                GradientProfile(str(place), self.shapes[place], 4 * math.prod(self.shapes[place]), ready)
                for bucket, ready in zip(places, moments, strict=True)
                for place in bucket
            ),
            hooks={NOOP: HookProfile(NOOP, "fifo", step, plain)},
            own_share=0.0,
            bucket_cap_mb=self.bucket_cap_mb,
        )
        shapes = [tuple(self.shapes[place] for place in bucket) for bucket in places]
        found = {}
        for hook, own in costs.items():
            sends = _sends_of(compressor_in_file(own.compressor), shapes, ranks, are_alike=self.are_alike)
            buckets = []
            for bucket, inside, rounds in zip(plain, shapes, sends, strict=True):
                *before, after = own.seconds(inside, ranks, copy, len(rounds))
                timed = tuple(map(RoundProfile, before, rounds))
                buckets.append(dataclasses.replace(bucket, rounds=timed, after=after))
            made = HookProfile(hook, "fifo", step, tuple(buckets))
            seconds = step_time(step_of(profile, made, buckets), NoLink(), ranks).seconds
            found[label_in_profile(hook)] = dataclasses.replace(made, step=step.lasting(seconds))
        return dataclasses.replace(profile, hooks={**profile.hooks, **found})


def _sends_of(
    compressor: Compressor, buckets: Sequence[tuple[Shape, ...]], ranks: int, *, are_alike: bool
) -> list[tuple[Sends, ...]]:
    """Return each bucket's payloads in each round.

    Buckets of the same shapes are counted once. If all parameters are alike, one of them is counted, and its payload
    multiplied, unless the bucket is padded as a whole.
    """
    generator = torch.Generator()

    def count(shapes: Sequence[Shape]) -> tuple[Sends, ...]:
        generator.manual_seed(0)
        gradients = {
            str(place): torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            for place, shape in enumerate(shapes)
        }
        return rounds_of(compressor, gradients, ranks)

    are_multiples = are_alike and not is_padded(count(buckets[0][:1]))
    counted: dict[tuple[Shape, ...], tuple[Sends, ...]] = {}
    found = []
    for shapes in buckets:
        key = shapes[:1] if are_multiples else shapes
        if key not in counted:
            counted[key] = count(key)
        times = len(shapes) // len(key)
        found.append(tuple(tuple((kind, times * payload) for kind, payload in sends) for sends in counted[key]))
    return found
