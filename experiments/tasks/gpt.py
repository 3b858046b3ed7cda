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

from .task import Batch, Evaluation, generator_for, size_named

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


@dataclass(frozen=True)
class Gpt:
    """Next-byte prediction, AdamW."""

    shape: GptSize
    size: str
    name: str = "gpt"

    @classmethod
    def of_size(cls, size: str) -> Gpt:
        """Return the task in one of its presets."""
        return cls(size_named(SIZES, size, "gpt"), size)

    @property
    def default_steps(self) -> int:
        """How many steps a run takes by default."""
        return self.shape.steps

    @property
    def description(self) -> str:
        """One sentence for the report."""
        s = self.shape
        return (
            f"the source of Python's standard library, byte by byte (every tenth file held out), a GPT of {s.layers} "
            f"layer{'s' * (s.layers > 1)} and width {s.width}, AdamW, {s.batch_size} sequences of {s.context} bytes "
            "per rank and step"
        )

    @property
    def batch_size(self) -> int:
        """Examples per rank and step."""
        return self.shape.batch_size

    def with_batch_size(self, batch_size: int) -> Gpt:
        """Return the same task with another batch size."""
        return replace(self, shape=replace(self.shape, batch_size=batch_size))

    def model(self, seed: int) -> nn.Module:
        """Return a fresh model."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return GptModel(self.shape)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW; weight decay applies only to matrices."""
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def learning_rate(self, step: int, steps: int) -> float:
        """Return a rate that rises over ten steps and falls along a cosine to a tenth."""
        return 1e-3 * min(1.0, (step + 1) / _WARM_UP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * step / steps))

    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Batch:
        """Return this rank's sequences of one step, cut at random places."""
        return _sequences(
            _text()[0], self.shape.batch_size, self.shape.context, generator_for(seed, step, rank, world_size)
        )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte."""
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Evaluate the model on 256 sequences of the held-out files, the same ones every time."""
        batch = _sequences(_text()[1], 256, self.shape.context, torch.Generator().manual_seed(256))
        was_training = model.training
        model.eval()
        with torch.no_grad():
            outputs = torch.cat([model(part) for part in batch.inputs.split(64)])
        model.train(was_training)
        loss = self.loss(outputs, batch.targets).item()
        right = (outputs.argmax(dim=-1) == batch.targets).float().mean().item()
        return Evaluation(loss=loss, accuracy=right, bits_per_byte=loss / math.log(2))


def _sequences(text: Tensor, count: int, context: int, generator: torch.Generator) -> Batch:
    """Return `count` pieces of the text, each with the piece one byte further on as its target."""
    begins = torch.randint(len(text) - context, (count, 1), generator=generator)
    windows = text[begins + torch.arange(context + 1)].long()  # count×(context + 1)
    return Batch(windows[:, :-1], windows[:, 1:])


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
