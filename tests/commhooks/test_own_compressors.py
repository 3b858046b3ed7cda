"""The examples of compressors that others write, docs/examples, under the laws that matter most to them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from commhooks import Compressor, ErrorFeedback, TwoHop
from tests.commhooks.workers import Workers, mean_of, normal, zeros

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SHAPES = ((24, 40), (40,), (3, 5, 3, 3), (64, 33), (7,), (0, 4), ())


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DITHERING = example("dithering").Dithering
COMPRESSORS: dict[str, Compressor] = {
    "dithering": ErrorFeedback(inner=TwoHop(codec=DITHERING(block=32))),
    "momentum-top-k": ErrorFeedback(inner=example("momentum_top_k").MomentumTopK(ratio=0.05)),
}
every_example = pytest.mark.parametrize("name", COMPRESSORS)


@every_example
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
def test_replicas_agree_and_resume_bit_for_bit(name: str, dtype: torch.dtype, ranks: int) -> None:
    parameters = zeros(*SHAPES, dtype=dtype)
    workers, resumed = (Workers(COMPRESSORS[name], ranks, parameters, buckets=2, policy="fused") for _ in range(2))
    for step in range(3):
        for means in (every := workers.step(normal(parameters, ranks, seed=step))):
            assert all(map(torch.equal, means, every[0]))
    resumed.resume(workers.saved())
    for step in range(3, 5):
        gradients = normal(parameters, ranks, seed=step)
        for means, others in zip(workers.step(gradients), resumed.step(gradients), strict=True):
            assert all(map(torch.equal, means, others))


@every_example
def test_an_inf_on_one_rank_shows_on_all_and_commits_nothing(name: str) -> None:
    parameters = zeros(*SHAPES)
    workers, undisturbed = (Workers(COMPRESSORS[name], 2, parameters) for _ in range(2))
    for each in (workers, undisturbed):
        each.step(normal(parameters, 2, seed=0))
    spoiled = normal(parameters, 2, seed=1)
    spoiled[1][0][3, 5] = float("inf")
    for means in workers.step(spoiled):
        assert not torch.isfinite(means[0]).all()
    undisturbed.step_number += 1  # noise is drawn for each step
    gradients = normal(parameters, 2, seed=2)
    for means, others in zip(workers.step(gradients), undisturbed.step(gradients), strict=True):
        assert all(map(torch.equal, means, others))


def test_dithering_sends_three_bits_and_is_right_on_average() -> None:
    codec = DITHERING(block=64)
    generator = torch.Generator().manual_seed(1)
    block = torch.randn(1, 64, generator=generator).expand(20_000, -1)
    code = codec.encode(block, torch.rand(block.shape, generator=generator))
    assert sum(payload[0].numel() * payload.element_size() for payload in code) == 64 * 3 // 8 + 4
    decoded = codec.decode(code)
    step = float(block.abs().max()) / 3
    assert float((decoded - block).abs().max()) <= step * (1 + 1e-6)
    # Six standard errors of a mean of 20,000 draws that vary by at most half a step.
    assert float((decoded.mean(0) - block[0]).abs().max()) <= 6 * step / 2 / 20_000**0.5
    lost = float((decoded - block).square().sum(1).mean() / block[0].square().sum())
    assert lost <= codec.relative_error()


def test_what_top_k_of_a_momentum_leaves_is_sent_later() -> None:
    """Sent and kept add up to the momenta so far, of which each step adds one."""
    parameters = zeros((24, 40))
    workers = Workers(COMPRESSORS["momentum-top-k"], 2, parameters)
    momentum = wanted = got = torch.zeros(24, 40, dtype=torch.float64)
    for step in range(30):
        gradients = normal(parameters, 2, seed=step)
        momentum = 0.9 * momentum + mean_of(gradients, 0)
        wanted = wanted + momentum
        got = got + workers.step(gradients)[0][0].double()
    kept = torch.stack([workers.residual(rank, 0).double() for rank in range(2)]).mean(0)
    assert float((wanted - got - kept).abs().max()) <= 1e-3
    assert float(kept.norm()) > 1
