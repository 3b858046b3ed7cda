"""What fp16 on the wire loses: it must hold shares of the mean, which shrink with the number of ranks."""

from __future__ import annotations

import pytest
import torch

from commhooks import Compressor, WireDtype
from commhooks.compressors import AllReduceMean, Cast
from commhooks.scheduling import packing
from tests.commhooks.workers import Workers

RANKS = 64
SMALLEST = 2.0**-24  # fp16's; half of it rounds to 0, which is even
FORMS = [Cast(dtype=torch.float16), WireDtype(inner=AllReduceMean(), dtype=torch.float16)]


def mean_of(compressor: Compressor, *gradients: float, steps: int = 1) -> float:
    """Return the mean that rank 0 gets, averaged over `steps`, of one element that each rank holds all along."""
    parameter = torch.zeros(1)
    workers = Workers(compressor, len(gradients), [parameter])
    given = [[torch.tensor([gradient])] for gradient in gradients]
    return sum(float(workers.step(given)[0][0]) for _ in range(steps)) / steps


@pytest.mark.parametrize("compressor", FORMS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    ("each", "mean"),
    [
        (1.5e-6, 0.0),  # a share of 2.3e-8
        (RANKS * SMALLEST / 2, 0.0),
        (RANKS * SMALLEST / 2 * 1.001, RANKS * SMALLEST),
        (RANKS * SMALLEST, RANKS * SMALLEST),
    ],
)
def test_a_share_of_at_most_half_of_fp16s_smallest_number_vanishes(
    compressor: Compressor, each: float, mean: float
) -> None:
    assert torch.tensor(each).half() > 0, "fp16 can hold the mean itself"
    assert mean_of(compressor, *[each] * RANKS) == mean


def test_bf16_keeps_it() -> None:
    # bf16 rounds the share, and the sum after every rank: 64 times 2**-8, half a unit in the last place of 8 bits.
    assert mean_of(Cast(dtype=torch.bfloat16), *[1.5e-6] * RANKS) == pytest.approx(1.5e-6, rel=RANKS * 2**-8)


@pytest.mark.parametrize("compressor", FORMS, ids=lambda one: type(one).__name__)
def test_what_must_not_overflow_is_a_share(compressor: Compressor) -> None:
    assert mean_of(compressor, 1e5, 0.0) == pytest.approx(5e4, rel=2**-11)
    assert not abs(mean_of(compressor, 3e5, -3e5)) < 1  # shares of 1.5e5: inf - inf, although the mean is 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_one_call_on_a_gpu_rounds_as_two_do_on_a_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [[torch.randn(1000, generator=torch.Generator().manual_seed(rank))] for rank in range(3)]
    found = []
    for is_queued in (False, True):
        monkeypatch.setattr(packing, "runs_later", lambda tensor, is_queued=is_queued: is_queued)
        workers = Workers(Cast(dtype=dtype), 3, [torch.zeros(1000)])
        found.append([mean for (mean,) in workers.step(gradients)])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
