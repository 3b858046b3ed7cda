"""A task on which PowerSGD of rank 1 collapses: one of its layers has a gradient of flat spectrum.

With error feedback and a rate that is high for rank 1, what rank 1 puts off of that layer comes too late, and training
diverges. Adaptive ranks take columns from the layers that need only one.
"""

from __future__ import annotations

import pytest
import torch

from commhooks import Compressor, make_compressor
from tests.commhooks.workers import Workers, zeros
from tests.tiers import A_ROW

SIZE, SIMPLE_LAYERS, WORLD_SIZE = 64, 5, 2


def trained(compressor: Compressor, seed: int, steps: int) -> tuple[float, float]:
    """Return the loss at the end over that at the beginning, and payload bytes a step."""
    generator = torch.Generator().manual_seed(seed)
    simple = [
        torch.randn(SIZE, 1, generator=generator) @ torch.randn(1, SIZE, generator=generator)
        for _ in range(SIMPLE_LAYERS)
    ]
    flat = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator))[0]  # all singular values are 1
    targets = [*(target / target.norm() * flat.norm() for target in simple), flat]
    workers = Workers(compressor, WORLD_SIZE, zeros(*[(SIZE, SIZE)] * len(targets)))
    layers = [torch.zeros(SIZE, SIZE) for _ in targets]
    for _ in range(steps):
        gradients = [
            [
                layer - target + torch.randn(SIZE, SIZE, generator=generator) * (0.05 / SIZE)
                for layer, target in zip(layers, targets, strict=True)
            ]
            for _ in range(WORLD_SIZE)
        ]
        for layer, mean in zip(layers, workers.step(gradients)[0], strict=True):
            layer.sub_(mean, alpha=0.1)
    loss = sum(float((layer - target).square().sum()) for layer, target in zip(layers, targets, strict=True))
    return loss / sum(float(target.square().sum()) for target in targets), workers.traffic.payload_bytes / steps


@A_ROW
@pytest.mark.parametrize(
    ("seeds", "steps"), [(1, 200), pytest.param(5, 300, marks=pytest.mark.soak)], ids=["one seed", "five seeds"]
)
def test_rank_1_collapses_where_adaptive_ranks_train(seeds: int, steps: int) -> None:
    for seed in range(seeds):
        uniform, _ = trained(make_compressor("powersgd", rank=1, min_compression_rate=1.0), seed, steps)
        adaptive, sent = trained(
            make_compressor("adaptive-rank", rank=2, max_rank=16, every=100, min_compression_rate=1.0), seed, steps
        )
        print(f"seed {seed}: rank 1 {uniform:.3g}, adaptive {adaptive:.3g} at {sent:.0f} bytes a step")
        assert adaptive < 0.5 < 2 < uniform
