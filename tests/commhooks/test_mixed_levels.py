"""Ranks on different processors, with different compiled passes or none, compute the same means and bases."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from commhooks.compressors.powersgd import AdaptiveRank, PowerSGD, UnbiasedPowerSGD
from commhooks.compressors.powersgd.low_rank import product
from commhooks.compressors.powersgd.orthonormal import orthonormal_rows
from commhooks.language import BucketView, Compressor, Context, Exchange
from commhooks.native import library
from tests.commhooks.workers import Workers, normal, zeros

pytestmark = pytest.mark.kernels

BUILT = library.opened(library.PATH)
LEVELS = () if isinstance(BUILT, str) else library.levels_of(BUILT)
WORDS = ("off", *LEVELS)
SHAPES = [(20, 30), (30,), (20, 30), (8, 4, 3, 3), (3, 40, 50), (70, 130), (5,), (300, 40)]


class _LevelOfRank:
    """Gives each rank a level of its own."""

    def compress(self, bucket: BucketView, context: Context) -> Exchange:
        os.environ[library.VARIABLE] = WORDS[context.rank]  # asked for before the first request
        yield from super().compress(bucket, context)  # type: ignore[misc]  # "undefined in superclass": a compressor's


def leveled(kind: type[Compressor], **settings: Any) -> Compressor:
    own = dataclasses.make_dataclass(f"_{kind.__name__}", [], bases=(_LevelOfRank, kind), frozen=True, kw_only=True)
    made: Compressor = own(**settings)
    return made


def powersgd(**settings: Any) -> Compressor:
    return leveled(PowerSGD, min_compression_rate=1.0, **settings)


def drawn(*shape: int, factor: float) -> Tensor:
    """Return numbers that no kernel rounds."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * factor
    return (numbers.frac() - 0.5).float().view(shape)


def test_means_and_bases_have_these_bits_on_every_processor() -> None:
    """The eager ones; `python -m tests.processors` runs this with other kernels of ATen and MKL."""
    digest = hashlib.sha256()
    for r, n, m in ((1, 33, 70), (2, 100, 257), (4, 300, 128), (7, 65, 1000), (8, 511, 256)):
        P, Q = drawn(r, n, factor=0.7390851), drawn(r, m, factor=0.5671433)
        mean = product(P.mT, Q, torch.empty(n, m), torch.empty(n * m))
        for tensor in (mean, orthonormal_rows(P), orthonormal_rows(P, 1e-3), orthonormal_rows(P.double())):
            digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest()[:16] == "1ea94aaf37c3a619"


@pytest.mark.parametrize(
    "compressor",
    [
        powersgd(rank=1),
        powersgd(rank=3, epsilon=1e-3),
        powersgd(rank=8),
        powersgd(rank=9),
        powersgd(rank=2, alternating=True),
        powersgd(rank=2, iterations=2, warm_start=False),
        powersgd(rank=3, matrices="whole-bucket"),
        leveled(AdaptiveRank, rank=2, min_rank=1, max_rank=4, every=4),
        leveled(UnbiasedPowerSGD, rank=2),
    ],
    ids=str,
)
def test_ranks_agree_in_every_bit_whatever_passes_they_have(
    compressor: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.VARIABLE, "off")  # and back to what it was
    workers = Workers(compressor, len(WORDS), zeros(*SHAPES))
    for step in range(30):
        gradients = normal(workers.parameters, len(WORDS), seed=step)
        if step == 7:
            gradients[-1][0][2, 3] = torch.inf
        first, *others = workers.step(gradients)
        for means in others:
            assert all(
                torch.equal(own.view(torch.int32), mean.view(torch.int32))
                for own, mean in zip(means, first, strict=True)
                if step != 7 or mean.isfinite().all()
            ), step
    for number, parameter in enumerate(workers.parameters):
        states = [states.of(parameter) for states in workers.states]
        for name, tensor in states[0].tensors.items():
            if name != "residual":
                assert all(torch.equal(own[name], tensor) for own in states[1:]), (number, name)
