"""Models of several buckets whose gradients are even integers, so that means are exact in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.commhooks.models import Given, Shape, gradients_of, wrap

SHAPES: list[Shape] = [(30, 50), (50,), (40, 30), (), (60, 60), (7,)]
SEVERAL_BUCKETS = {"bucket_cap_mb": 0.004}
Hook = Callable[[Any, Any], Any]


def integers(seed: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Return each of two ranks' gradients: even integers below 64, whose mean is exact in bf16 and fp16 too."""
    generator = torch.Generator().manual_seed(seed)
    return [[2 * torch.randint(-32, 32, s, generator=generator).to(dtype) for s in SHAPES] for _ in range(2)]


def means(gradients: list[list[Tensor]]) -> list[Tensor]:
    return [(a + b) / 2 for a, b in zip(*gradients, strict=True)]


def given(kind: str, *shapes: Shape, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    return wrap(kind, Given(*(shapes or SHAPES), dtype=dtype), **(SEVERAL_BUCKETS | settings))


def hooked(kind: str, hook: Hook, state: Any = None, **settings: Any) -> nn.Module:
    model = given(kind, **settings)
    model.register_comm_hook(state, hook)  # type: ignore[operator]  # 'Tensor not callable'
    return model


def step(model: nn.Module, gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients after a backward pass of a real loss; torch's gradient of Re(w·g) is g's conjugate."""
    model.zero_grad()
    model(*[g.conj() for g in gradients]).real.backward()
    return gradients_of(model)


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))
