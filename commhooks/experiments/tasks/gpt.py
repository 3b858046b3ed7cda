"""A small GPT: a byte-level language model with attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor, nn

from commhooks.experiments.tasks.sizes import asked_for, size_named
from commhooks.experiments.tasks.task import Task
from commhooks.experiments.tasks.text import BYTES, language_task


@dataclass(frozen=True, kw_only=True)
class GptSize:
    """The size of the model and of its batch."""

    width: int  # higher: a larger model
    layers: int
    heads: int
    context: int  # bytes that the model sees at once
    batch_size: int  # sequences per rank and step
    steps: int


SIZES = {
    "tiny": GptSize(width=48, layers=1, heads=2, context=32, batch_size=4, steps=120),
    "small": GptSize(width=64, layers=2, heads=2, context=32, batch_size=4, steps=40),
    "medium": GptSize(width=192, layers=4, heads=6, context=64, batch_size=4, steps=80),
    "base": GptSize(width=256, layers=5, heads=8, context=64, batch_size=4, steps=200),
    "large": GptSize(width=384, layers=6, heads=6, context=128, batch_size=8, steps=300),
}


class Block(nn.Module):
    """Causal attention, then a two-layer network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1: nn.LayerNorm = nn.LayerNorm(width)
        self.attend: nn.Linear = nn.Linear(width, 3 * width)
        self.merge: nn.Linear = nn.Linear(width, width)
        self.norm2: nn.LayerNorm = nn.LayerNorm(width)
        self.widen: nn.Linear = nn.Linear(width, 4 * width)
        self.narrow: nn.Linear = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return activations, N×T×C, for activations, N×T×C."""
        n, t, c = x.shape
        q, k, v = self.attend(self.norm1(x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # N×heads×T×(C/heads)
        x = x + self.merge(seen.transpose(1, 2).reshape(n, t, c))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))  # type: ignore[no-any-return]  # modules are untyped


class GptModel(nn.Module):
    """Embeddings, blocks, and a score for each of the 256 possible next bytes."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.byte: nn.Embedding = nn.Embedding(BYTES, size.width)
        self.position: nn.Embedding = nn.Embedding(size.context, size.width)
        self.blocks: nn.Sequential = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm: nn.LayerNorm = nn.LayerNorm(size.width)
        self.head: nn.Linear = nn.Linear(size.width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                last_of_block = name.endswith(("merge.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers) if last_of_block else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores, N×T×256, for bytes, N×T."""
        x = self.byte(text) + self.position.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]  # modules are untyped


def gpt(
    size: str = "medium",
    *,
    width: int = 0,
    layers: int = 0,
    heads: int = 0,
    context: int = 0,
    batch_size: int = 0,
    steps: int = 0,
) -> Task:
    """Return next-byte prediction with a GPT and AdamW; a 0 stands for the size's own value.

    Args:
        size: "tiny", "small", "medium", "base" (4.1 million parameters) or "large".
        width: The model's width.
        layers: The number of layers.
        heads: The number of attention heads; it must divide the width.
        context: Bytes that the model sees at once.
        batch_size: Sequences per rank and step.
        steps: Optimizer steps of a run.

    """
    asked = asked_for(width=width, layers=layers, heads=heads, context=context, batch_size=batch_size, steps=steps)
    shape = replace(size_named(SIZES, size), **asked)
    if shape.width % shape.heads:
        raise ValueError(f"{shape.heads} heads do not divide a width of {shape.width}")
    return language_task(
        GptModel(shape),
        f"a GPT of {shape.layers} layer{'s' * (shape.layers > 1)} and width {shape.width}",
        context=shape.context,
        batch_size=shape.batch_size,
        steps=shape.steps,
    )
