"""Eight kinds of model, small and in plain PyTorch, each with a task that it learns in a hundred steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
"""Inputs and classes."""
WIDTH, CLASSES = 64, 8


class Kind(NamedTuple):
    """A kind of model: `blocks` of it are FSDP modules of their own; logits have the classes last."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    uses_all: bool = True
    """False if some parameters get no gradient in some steps."""


# --- tasks ------------------------------------------------------------------------------------------------------------


def _fixed(*shape: int) -> Tensor:
    """Return random numbers that are the same in every run: what a task is about."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def clusters(generator: torch.Generator, size: int = 16) -> Batch:
    """Return points around the centres of classes."""
    classes = torch.randint(CLASSES, (size,), generator=generator)
    return _fixed(CLASSES, WIDTH)[classes] + 2.5 * torch.randn(size, WIDTH, generator=generator), classes


def pictures(generator: torch.Generator, size: int = 16) -> Batch:
    """Return pictures with a class's pattern, in noise."""
    classes = torch.randint(CLASSES, (size,), generator=generator)
    return _fixed(CLASSES, 3, 16, 16)[classes] + 3.0 * torch.randn(size, 3, 16, 16, generator=generator), classes


def sounds(generator: torch.Generator, size: int = 16) -> Batch:
    """Return waves of a class's frequency, at any phase, in noise."""
    classes = torch.randint(CLASSES, (size,), generator=generator)
    phases = 2 * math.pi * torch.rand(size, 1, generator=generator)
    waves = torch.sin(torch.arange(320) * 0.05 * (1 + classes.view(-1, 1)) + phases)
    return (waves + 1.0 * torch.randn(size, 320, generator=generator)).unsqueeze(1), classes


def words(generator: torch.Generator, size: int = 16, length: int = 12) -> Batch:
    """Return words of a Markov chain, and the word after each."""
    following = (3.0 * _fixed(32, 32)).softmax(-1)
    chain = [torch.randint(32, (size,), generator=generator)]
    for _ in range(length):
        chain.append(torch.multinomial(following[chain[-1]], 1, generator=generator).squeeze(1))
    sequence = torch.stack(chain, 1)
    return sequence[:, :-1], sequence[:, 1:]


def held_out(kind: Kind) -> Batch:
    """Return data on which nothing is trained."""
    generator = torch.Generator().manual_seed(10**6)
    inputs, classes = zip(*(kind.batch(generator) for _ in range(8)), strict=True)
    return torch.cat(inputs), torch.cat(classes)


def loss_of(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    inputs, classes = batch
    logits = model(inputs)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), classes.reshape(-1))


# --- models -----------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """A layer that embeds, blocks in a row, and a head."""

    def __init__(self, embed: nn.Module, blocks: Sequence[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = embed, nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class Positions(nn.Module):
    """Adds a learned vector to each place of a sequence."""

    def __init__(self, embed: nn.Module, length: int) -> None:
        super().__init__()
        self.embed, self.places = embed, nn.Parameter(0.02 * torch.randn(length, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.embed(x) + self.places
        return y


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return y


def gpt() -> nn.Module:
    blocks = [Attention(causal=True) for _ in range(2)]
    return Network(Positions(nn.Embedding(32, WIDTH), 12), blocks, nn.Linear(WIDTH, 32))


class Averaged(nn.Module):
    """A linear layer on the average over all places."""

    def __init__(self, *dimensions: int) -> None:
        super().__init__()
        self.dimensions, self.linear = dimensions, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.mean(self.dimensions))
        return y


def vit() -> nn.Module:
    patches = nn.Sequential(nn.Unflatten(2, (4, 4)), nn.Unflatten(4, (4, 4)), Patches(), nn.Linear(48, WIDTH))
    return Network(Positions(patches, 16), [Attention(causal=False) for _ in range(2)], Averaged(1))


class Patches(nn.Module):
    """Makes pixels [batch, 3, 4, 4, 4, 4] a sequence of patches [batch, 16, 48]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class Residual(nn.Module):
    """A block of a ResNet, which halves the picture."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(4, outputs),
        )
        self.short = nn.Conv2d(inputs, outputs, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.body(x) + self.short(x)).relu()
        return y


def resnet() -> nn.Module:
    return Network(nn.Conv2d(3, 16, 3, padding=1), [Residual(16, 32), Residual(32, WIDTH)], Averaged(2, 3))


def sounds_network() -> nn.Module:
    layers = [nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, stride=2), nn.GroupNorm(4, WIDTH), nn.GELU()) for _ in range(3)]
    return Network(nn.Sequential(nn.Conv1d(1, WIDTH, 10, stride=5), nn.GELU()), layers, Averaged(2))


class Recurrent(nn.Module):
    """An LSTM over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x)[0]
        return y


def lstm() -> nn.Module:
    return Network(nn.Embedding(32, WIDTH), [Recurrent()], nn.Linear(WIDTH, 32))


class FusedExperts(nn.Module):
    """Experts with one weight [experts, out, in] for all; each point goes to the best two."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        gates, chosen = self.router(normal).softmax(-1).topk(2)
        sent = torch.zeros(len(x), len(self.up), device=x.device).scatter(1, chosen, gates)
        hidden = torch.einsum("td,ehd->teh", normal, self.up).relu()
        return x + torch.einsum("teh,edh,te->td", hidden, self.down, sent)


class SeparateExperts(nn.Module):
    """Experts that are layers; each point goes to the best one, and an expert that gets no point is not used."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        gates, chosen = self.router(normal).softmax(-1).max(-1)
        y = x
        for number, expert in enumerate(self.experts):
            points = (chosen == number).nonzero().squeeze(1)
            if len(points):
                y = y.index_add(0, points, gates[points, None] * expert(normal[points]))
        return y


def fused_experts() -> nn.Module:
    return Network(nn.Linear(WIDTH, WIDTH), [FusedExperts()], nn.Linear(WIDTH, CLASSES))


def separate_experts() -> nn.Module:
    return Network(nn.Linear(WIDTH, WIDTH), [SeparateExperts()], nn.Linear(WIDTH, CLASSES))


class Adapted(nn.Module):
    """A frozen layer beside a trained pair of matrices (LoRA)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.B = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + 2.0 * F.linear(F.linear(x, self.A), self.B)
        return y


def lora() -> nn.Module:
    blocks = [nn.Sequential(Adapted(WIDTH, 4 * WIDTH), nn.ReLU(), Adapted(4 * WIDTH, WIDTH)) for _ in range(2)]
    return Network(Adapted(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, CLASSES))


KINDS: dict[str, Kind] = {
    "GPT": Kind(gpt, words),
    "ResNet": Kind(resnet, pictures),
    "ViT": Kind(vit, pictures),
    "convolution over time": Kind(sounds_network, sounds),
    "LSTM": Kind(lstm, words),
    "mixture, fused": Kind(fused_experts, clusters),
    "mixture, separate": Kind(separate_experts, clusters, uses_all=False),
    "LoRA": Kind(lora, clusters),
}


def made(kind: Kind, seed: int) -> Any:
    """Return a new model, the same on every rank."""
    torch.manual_seed(seed)
    return kind.make()
