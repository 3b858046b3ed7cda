"""A long short-term memory: a byte-level language model without attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commhooks.experiments.tasks.sizes import asked_for, size_named
from commhooks.experiments.tasks.task import Task
from commhooks.experiments.tasks.text import BYTES, language_task


@dataclass(frozen=True, kw_only=True)
class LstmSize:
    """The size of the model and of its batch."""

    width: int  # higher: a larger model
    layers: int
    context: int  # symbols over which gradients flow
    batch_size: int  # sequences per rank and step
    steps: int


SIZES = {
    "tiny": LstmSize(width=48, layers=1, context=32, batch_size=4, steps=120),
    "small": LstmSize(width=96, layers=1, context=32, batch_size=4, steps=40),
    "medium": LstmSize(width=256, layers=2, context=64, batch_size=8, steps=80),
    "large": LstmSize(width=650, layers=3, context=64, batch_size=16, steps=300),
}


class LstmModel(nn.Module):
    """An embedding, LSTM layers, and scores by the same embedding (encoder and decoder are tied)."""

    def __init__(self, width: int, layers: int, vocabulary: int = BYTES) -> None:
        super().__init__()
        self.symbols: nn.Parameter = nn.Parameter(torch.empty(vocabulary, width).uniform_(-0.1, 0.1))
        self.layers: nn.LSTM = nn.LSTM(width, width, layers, batch_first=True)
        self.bias: nn.Parameter = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, text: Tensor) -> Tensor:
        """Return scores, N×T×vocabulary, for symbols, N×T."""
        return F.linear(self.layers(F.embedding(text, self.symbols))[0], self.symbols, self.bias)


def lstm(
    size: str = "medium",
    *,
    width: int = 0,
    layers: int = 0,
    context: int = 0,
    batch_size: int = 0,
    steps: int = 0,
) -> Task:
    """Return next-byte prediction with an LSTM and AdamW; a 0 stands for the size's own value.

    Args:
        size: "tiny", "small", "medium" or "large" (10 million parameters).
        width: The width of the embedding and of each layer.
        layers: The number of layers.
        context: Bytes over which gradients flow.
        batch_size: Sequences per rank and step.
        steps: Optimizer steps of a run.

    """
    asked = asked_for(width=width, layers=layers, context=context, batch_size=batch_size, steps=steps)
    shape = replace(size_named(SIZES, size), **asked)
    return language_task(
        LstmModel(shape.width, shape.layers),
        f"an LSTM of {shape.layers} layer{'s' * (shape.layers > 1)} and width {shape.width}",
        context=shape.context,
        batch_size=shape.batch_size,
        steps=shape.steps,
        lr=3e-3,
    )
