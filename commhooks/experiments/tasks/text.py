"""The text and the metrics of the byte-level language models: the source code of Python's own standard library.

A few megabytes of real text that every machine with Python has: nothing to download, and no tokenizer to explain.
"""

from __future__ import annotations

import math
import sysconfig
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commhooks.experiments.devices import moved
from commhooks.experiments.tasks.task import Draw, Task, generator_for

BYTES = 256  # the vocabulary
_HELD_OUT_EVERY = 10  # every tenth file is held out
_WARM_UP_STEPS = 10


def language_task(model: nn.Module, words: str, *, context: int, batch_size: int, steps: int, lr: float = 1e-3) -> Task:
    """Return next-byte prediction with AdamW.

    Args:
        model: A model that returns scores, N×T×256, for bytes, N×T.
        words: The model in words, for the description.
        context: Bytes that the model sees at once.
        batch_size: Sequences per rank and step.
        steps: Optimizer steps of a run.
        lr: Learning rate.

    """
    return Task(
        model=model,
        data=_drawn(context, batch_size),
        loss=lambda model, batch: _cross_entropy(model(batch[0]), batch[1]),
        evaluate=lambda model: _evaluate(model, context),
        optimizer=lambda model: _adamw(model, lr),
        schedule=lambda step, steps: (
            min(1.0, (step + 1) / _WARM_UP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        ),
        steps=steps,
        batch_size=batch_size,
        description=(
            f"the source of Python's standard library, byte by byte (every tenth file held out), {words}, AdamW, "
            f"{batch_size} sequences of {context} bytes per rank and step"
        ),
    )


def _drawn(context: int, batch_size: int) -> Draw:
    return lambda seed, step, rank, ranks: _sequences(
        _text()[0], batch_size, context, generator_for(seed, step, rank, ranks)
    )


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return AdamW; weight decay applies only to matrices."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _evaluate(model: nn.Module, context: int) -> dict[str, float]:
    """Evaluate the model on 256 sequences of the held-out files, the same ones every time."""
    sequences = _sequences(_text()[1], 256, context, torch.Generator().manual_seed(256))
    inputs, targets = moved(sequences, next(model.parameters()).device)
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
            f"expected the source files of Python's standard library in {folder}, found {len(files)}; use a Python "
            "that ships its library as .py files, or the task 'digits', which needs none"
        )
    return files


def _read(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
