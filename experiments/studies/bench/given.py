"""The input of hooks that are timed: shapes of gradients and a bucket of them, or the passes of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from commhooks.experiments.tasks.images import ResNet18

Shape = tuple[int, ...]

GPT_SHAPES: list[Shape] = [
    (2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,)
] * 4  # fmt: skip
"""Four layers of a GPT of width 768: 28.3 million parameters."""


def resnet18_shapes() -> list[Shape]:
    """Return the parameter shapes of the CIFAR form of ResNet-18: 11.2 million parameters."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in ResNet18().parameters()]


class GivenBucket:
    """A bucket with these parameters, by default a step's only one, in the form that our hooks and PyTorch's expect."""

    def __init__(self, parameters: Sequence[Tensor], index: int = 0, *, is_last: bool = True) -> None:
        self._index, self._is_last = index, is_last
        self._parameters: list[Tensor] = [p if isinstance(p, nn.Parameter) else nn.Parameter(p) for p in parameters]
        self._memory = parameters[0].new_zeros(sum(p.numel() for p in parameters))

    def index(self) -> int:
        """Return its number in the step."""
        return self._index

    def is_last(self) -> bool:
        """Return whether the step ends with it."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return the memory of all gradients."""
        return self._memory

    def set_buffer(self, memory: Tensor) -> None:
        """Replace the memory."""
        self._memory = memory

    def parameters(self) -> list[Tensor]:
        """Return the parameters."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Return a view of each parameter's gradient."""
        parts = self._memory.split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]

    def fill(self, gradients: Sequence[Tensor]) -> None:
        """Copy gradients into the memory."""
        for place, gradient in zip(self.gradients(), gradients, strict=True):
            place.copy_(gradient)


def refill(buckets: Mapping[str, GivenBucket], gradient: Tensor, who: str) -> None:
    """Copy the gradient of all parameters into a contender's bucket, if it has one."""
    if who in buckets:
        buckets[who].buffer().copy_(gradient)


def forward_and_backward(model: nn.Module, *inputs: Tensor) -> None:
    """Run the forward and the backward pass of the sum of what the model returns."""
    model.zero_grad()
    model(*inputs).sum().backward()
