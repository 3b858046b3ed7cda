"""What compressing and decompressing take: memory beside the bucket."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from commhooks import make_compressor
from commhooks.compressors import COMPRESSORS
from tests.cases import NEEDED
from tests.commhooks.test_powersgd_memory import NewMemory, step_as_it_is
from tests.commhooks.workers import Workers, zeros
from tests.tiers import rows, thorough

WORLD_SIZE = 8


def step(workers: Workers, gradient: Tensor) -> None:
    """Average the same gradient on every worker."""
    for memory in workers.memories:
        memory.copy_(gradient)
    step_as_it_is(workers)


def memory_beside_the_bucket(workers: Workers, gradient: Tensor) -> float:
    """Return the most new memory of a step, messages that are kept included, as a fraction of the bucket."""
    step(workers, gradient)
    with NewMemory() as memory:
        step(workers, gradient)
    messages = sum(one.nbytes for engine in workers.engines for one in engine.working_memory())
    buckets = sum(one.nbytes for one in workers.memories)
    return float(memory.peak_bytes + messages) / float(buckets)


SMALL = ((400, 600), (600,), (128, 48, 3, 3), (256, 512))
LIMITS = {"powersgd": 0.3}
# Codes of a byte or less, sent and received at the same time; those of two bytes, and a momentum (signum, dgc); all
# ranks' codes (affine), or factors (svd). Some tiles of 65,536 elements are an eighth of so small a bucket.
LIMITS |= dict.fromkeys(
    ("int8", "int4", "sign", "qsgd", "terngrad", "natural", "fp8", "mxfp8", "mxfp4", "e3m0", "codebook"), 0.7
)
LIMITS |= dict.fromkeys(("fp16-two-hop", "bf16-two-hop", "signum", "dgc"), 1.3) | {"affine": 3.5, "svd": 1.5}


QUICK = {"all-reduce", "powersgd", "top-k", "int8"}
SAME_WAY = {"int4", "qsgd", "terngrad", "natural", "fp8", "mxfp8", "e3m0", "codebook", "bf16-two-hop", "bf16", "distro"}
"""Other codes, dtypes or settings of compressors that each run has."""
ORDINARY = rows(sorted(COMPRESSORS.keys() - SAME_WAY - {"noop"}), unless=QUICK.__contains__)


@pytest.mark.parametrize("name", [*ORDINARY, *thorough(sorted(SAME_WAY))])
def test_a_step_takes_no_more_new_memory_than_the_bucket(name: str) -> None:
    workers = Workers(make_compressor(name, **NEEDED.get(name, {})), WORLD_SIZE, zeros(*SMALL))
    gradient = torch.randn(sum(p.numel() for p in workers.parameters), generator=torch.Generator().manual_seed(0))
    assert memory_beside_the_bucket(workers, gradient) <= LIMITS.get(name, 1.0)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_cast_is_sent_from_memory_that_the_step_before_gave_back(name: str) -> None:
    workers = Workers(make_compressor(name), 2, zeros(*SMALL))
    gradient = torch.ones(sum(p.numel() for p in workers.parameters))
    step(workers, gradient)
    with NewMemory() as memory:
        step(workers, gradient)
    assert memory.largest_bytes < gradient.nbytes / 100
