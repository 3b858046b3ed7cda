"""The examples of compressors that others write: what each does. test_checking.py tries the laws on them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import torch

from commhooks import ErrorFeedback
from tests.commhooks.workers import Workers, mean_of, normal, zeros

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DITHERING = example("dithering").Dithering
MOMENTUM_TOP_K = ErrorFeedback(inner=example("momentum_top_k").MomentumTopK(ratio=0.05))


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
    workers = Workers(MOMENTUM_TOP_K, 2, parameters)
    momentum = wanted = got = torch.zeros(24, 40, dtype=torch.float64)
    for step in range(30):
        gradients = normal(parameters, 2, seed=step)
        momentum = 0.9 * momentum + mean_of(gradients, 0)
        wanted = wanted + momentum
        got = got + workers.step(gradients)[0][0].double()
    kept = torch.stack([workers.residual(rank, 0).double() for rank in range(2)]).mean(0)
    assert float((wanted - got - kept).abs().max()) <= 1e-3
    assert float(kept.norm()) > 1
