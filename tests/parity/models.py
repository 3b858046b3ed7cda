"""Small models, one for each way in which gradients can reach a DDP."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 5))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def cnn_without_batchnorm() -> nn.Module:
    return nn.Sequential(*(layer for layer in cast(nn.Sequential, cnn()) if not isinstance(layer, nn.BatchNorm2d)))


def channels_last_cnn() -> nn.Module:
    return cnn_without_batchnorm().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]  # 'No overload variant of "to"': the stubs leave memory_format alone out


class TiedTransformer(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 30)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return cast(Tensor, self.head(x))


class Bag(nn.Module):
    """Two embeddings with sparse gradients before dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8, sparse=True)
        self.bags = nn.EmbeddingBag(20, 8, mode="sum", sparse=True)
        self.out = nn.Linear(8, 5)

    def forward(self, words: Tensor, bags: Tensor) -> Tensor:
        return cast(Tensor, self.out(self.words(words).mean(1) + self.bags(bags)))


class Branches(nn.Module):
    """Uses the branches that it is told to use; the last one is never used by anyone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.out = nn.Linear(16, 5)

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        x = torch.tanh(self.stem(x))
        return cast(Tensor, self.out(x + sum(self.branches[branch](x) for branch in used)))


class Outputs(nn.Module):
    """Returns several tensors, nested, of which the loss leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 16)
        self.heads = nn.ModuleList(nn.Linear(16, n) for n in (5, 3, 1))

    def forward(self, x: Tensor) -> dict[str, object]:
        x = torch.tanh(self.stem(x))
        first, second, third = (head(x) for head in self.heads)
        return {"pair": (first, second), "rest": [third, {"hidden": x}]}


class MixedPrecision(nn.Module):
    """fp32 and bf16 parameters in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.second = nn.Linear(24, 24).bfloat16()
        self.third = nn.Linear(24, 24)
        self.fourth = nn.Linear(24, 5).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).bfloat16()
        x = torch.tanh(self.second(x)).float()
        return cast(Tensor, self.fourth(torch.tanh(self.third(x)).bfloat16()).float())


class Checkpointed(nn.Module):
    """The same block twice, recomputed in the backward pass (the reentrant form)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 24)
        self.block = nn.Sequential(nn.Linear(24, 24), nn.Tanh())
        self.out = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for _ in range(2):
            x = cast(Tensor, checkpoint(self.block, x, use_reentrant=True))
        return cast(Tensor, self.out(x))


class Odd(nn.Module):
    """A 0-dim parameter, an empty one, a frozen one, a transposed one, and a buffer that every step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(16, 12).t())
        self.out = nn.Linear(16, 5)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.sum()
        hidden = torch.tanh(x @ self.transposed * self.scale + self.frozen)
        return cast(Tensor, self.out(hidden)) + self.empty.sum()


def cross_entropy(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), target.flatten())
