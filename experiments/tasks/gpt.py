"""A byte-level language model on the source code of Python's own standard library.

A few megabytes of real text that every machine with Python has: nothing to download, and no tokenizer to explain.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .task import Task, generator_for, size_named

_BYTES = 256  # the vocabulary
_HELD_OUT_EVERY = 10  # every tenth file is held out
_WARM_UP_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class GptSize:
    """How large the model and its batch are."""

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
    "large": GptSize(width=384, layers=6, heads=6, context=128, batch_size=8, steps=300),
}


class Block(nn.Module):
    """Causal attention, then a two-layer network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

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
        self.byte = nn.Embedding(_BYTES, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, _BYTES, bias=False)
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
    """Return next-byte prediction with AdamW; a 0 stands for the size's own value.

    Args:
        size: "tiny", "small", "medium" or "large".
        width: Of the model.
        layers: Of the model.
        heads: Attention heads; they must divide the width.
        context: Bytes that the model sees at once.
        batch_size: Sequences per rank and step.
        steps: Optimizer steps of a run.

    """
    preset = size_named(SIZES, size, "gpt")
    asked = {"width": width, "layers": layers, "heads": heads, "context": context}
    asked |= {"batch_size": batch_size, "steps": steps}
    shape = replace(preset, **{name: value for name, value in asked.items() if value})
    if shape.width % shape.heads:
        raise ValueError(f"task 'gpt': {shape.heads} heads do not divide a width of {shape.width}")
    return Task(
        model=GptModel(shape),
        data=lambda seed, step, rank, ranks: _sequences(
            _text()[0], shape.batch_size, shape.context, generator_for(seed, step, rank, ranks)
        ),
        loss=lambda model, batch: _cross_entropy(model(batch[0]), batch[1]),
        evaluate=lambda model: _evaluate(model, shape.context),
        optimizer=_adamw,
        schedule=lambda step, steps: (
            min(1.0, (step + 1) / _WARM_UP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        ),
        steps=shape.steps,
        batch_size=shape.batch_size,
        description=(
            f"the source of Python's standard library, byte by byte (every tenth file held out), a GPT of "
            f"{shape.layers} layer{'s' * (shape.layers > 1)} and width {shape.width}, AdamW, {shape.batch_size} "
            f"sequences of {shape.context} bytes per rank and step"
        ),
    )


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW; weight decay applies only to matrices."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _evaluate(model: nn.Module, context: int) -> dict[str, float]:
    """Evaluate the model on 256 sequences of the held-out files, the same ones every time."""
    inputs, targets = _sequences(_text()[1], 256, context, torch.Generator().manual_seed(256))
    outputs = torch.cat([model(part) for part in inputs.split(64)])
    loss = _cross_entropy(outputs, targets).item()
    right = (outputs.argmax(dim=-1) == targets).float().mean().item()
    return {"loss": loss, "accuracy": right, "bits_per_byte": loss / math.log(2)}


def _sequences(text: Tensor, count: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return `count` pieces of the text, each with the piece one byte further on as its target."""
    begins = torch.randint(len(text) - context, (count, 1), generator=generator)
    windows = text[begins + torch.arange(context + 1)].long()  # count×(context + 1)
    return windows[:, :-1], windows[:, 1:]


@cache
def _text() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on and the bytes held out."""
    files = source_files(Path(sysconfig.get_path("stdlib")))
    held_out = files[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    rest = [file for file in files if file not in set(held_out)]
    return _read(rest), _read(held_out)


def source_files(folder: Path) -> list[Path]:
    """Return the modules directly in the library's folder, by name, without packages and site-packages.

    Raises:
        FileNotFoundError: The library does not exist as files (a zipped or stripped Python).

    """
    files = sorted(
        file for file in folder.glob("*.py") if not file.name.startswith("_sysconfigdata")
    )  # made per machine
    if len(files) < _HELD_OUT_EVERY:
        raise FileNotFoundError(
            f"gpt: expected the source files of Python's standard library in {folder}, found {len(files)}; "
            "use a Python that ships its library as .py files"
        )
    return files


def _read(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
