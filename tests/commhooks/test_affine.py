"""Affine codes: PyTorch's, where its hooks have them, and the same on every rank."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver

from commhooks.compressors import Affine
from tests import bounds
from tests.commhooks.workers import Workers, normal, zeros


@pytest.mark.parametrize("seed", range(20))
def test_the_mean_is_that_of_pytorchs_codes(seed: int) -> None:
    workers = Workers(Affine(), 3, zeros((700,)))
    gradients = normal(workers.parameters, 3, seed=seed, scale=10.0 ** (seed % 5 - 2))
    decoded = []
    for (gradient,) in gradients:
        observer = MinMaxObserver()
        observer(gradient)
        scale, zero = (float(one) for one in observer.calculate_qparams())
        codes = numpy.clip(numpy.round(gradient.double().numpy() / scale) + zero, 0, 255)
        decoded.append(scale * (codes - zero))
    ours, reference = workers.step(gradients)[0][0].double().numpy(), numpy.mean(decoded, axis=0)
    step = max(float(gradient.max() - gradient.min()) for (gradient,) in gradients) / 255
    different = abs(ours - reference) > 32 * bounds.unit_roundoff(torch.float32) * abs(reference).max()
    # A quotient that all but lies between two codes may be rounded to either.
    assert different.mean() <= 0.01 and abs(ours - reference).max() <= step


def test_each_channel_has_its_own_range() -> None:
    gradient = torch.cat([torch.linspace(-1, 1, 64), torch.linspace(0, 1e-3, 64), torch.linspace(5, 6, 10)])
    mean = Workers(Affine(channel=64), 1, zeros((138,))).step([[gradient]])[0][0]
    observer = PerChannelMinMaxObserver()
    observer(torch.nn.functional.pad(gradient, (0, 54)).view(3, 64))
    scales, _ = observer.calculate_qparams()
    for number, piece in enumerate(gradient.split(64)):
        error = (mean.split(64)[number] - piece).abs().amax()
        assert error <= float(scales[number]) * (0.5 + 1e-3)


def test_small_gradients_are_not_lost_as_pytorchs_hook_loses_them() -> None:
    """Its scale is at least 1.2e-7, so gradients of 1e-9 become zeros."""
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 1e-9
    mean = Workers(Affine(), 2, zeros((100,))).step([[gradient]] * 2)[0][0]
    assert (mean - gradient).abs().amax() <= (gradient.max() - gradient.min()) / 255
