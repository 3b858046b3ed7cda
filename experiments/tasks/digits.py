"""scikit-learn's handwritten digits with a small network.

1,797 grey images of 8×8 pixels that ship with scikit-learn: real handwriting, nothing to download.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from .task import Task, size_named

_HELD_OUT = 360  # of 1,797: a fifth


@dataclass(frozen=True, kw_only=True)
class DigitsSize:
    """How large the network and its batch are."""

    channels: int  # higher: a larger model
    batch_size: int  # images per rank and step
    steps: int
    convolutions: bool = True  # False: two hidden layers with `channels` units, which take a tenth of the time


SIZES = {
    "tiny": DigitsSize(channels=128, batch_size=16, steps=160, convolutions=False),
    "small": DigitsSize(channels=8, batch_size=16, steps=40),
    "medium": DigitsSize(channels=32, batch_size=32, steps=80),
    "large": DigitsSize(channels=64, batch_size=64, steps=200),
}


class DigitsNet(nn.Module):
    """Three convolutions with batch norm, then a linear layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        c = channels
        self.features = nn.Sequential(
            *(nn.Conv2d(1, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU()),
            *(nn.Conv2d(c, 2 * c, 3, padding=1, bias=False), nn.BatchNorm2d(2 * c), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(2 * c, 4 * c, 3, padding=1, bias=False), nn.BatchNorm2d(4 * c), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.classify = nn.Sequential(nn.Flatten(), nn.Linear(16 * c, 4 * c), nn.ReLU(), nn.Linear(4 * c, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Return scores, N×10, for images, N×1×8×8."""
        return self.classify(self.features(images))  # type: ignore[no-any-return]  # Sequential is untyped


class DigitsMlp(nn.Sequential):
    """Two hidden layers without batch norm: everything that it learns arrives as gradients."""

    def __init__(self, width: int) -> None:
        hidden = (nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        super().__init__(nn.Flatten(), *hidden, nn.Linear(width, 10))


def digits(size: str = "medium", *, channels: int = 0, batch_size: int = 0, steps: int = 0) -> Task:
    """Return handwritten digits with SGD and momentum.

    Args:
        size: "tiny", "small", "medium" or "large".
        channels: Of the first layer; 0: the size's own.
        batch_size: Images per rank and step; 0: the size's own.
        steps: Optimizer steps of a run; 0: the size's own.

    """
    preset = size_named(SIZES, size, "digits")
    shape = replace(
        preset,
        channels=channels or preset.channels,
        batch_size=batch_size or preset.batch_size,
        steps=steps or preset.steps,
    )
    network = (
        f"a convolutional network with batch norm ({shape.channels} channels in its first layer)"
        if shape.convolutions
        else f"a perceptron with two hidden layers of {shape.channels}"
    )
    return Task(
        model=DigitsNet(shape.channels) if shape.convolutions else DigitsMlp(shape.channels),
        data=TensorDataset(*_data()[0]),
        held_out=TensorDataset(*_data()[1]),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        evaluate=_evaluate,
        optimizer=lambda model: torch.optim.SGD(
            model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4
        ),
        schedule=lambda step, steps: min(1.0, (step + 1) / 5) * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
        batch_size=shape.batch_size,
        steps=shape.steps,
        description=(
            f"scikit-learn's handwritten digits (1,437 images to train on, 360 held out), {network}, SGD with "
            f"momentum, {shape.batch_size} images per rank and step"
        ),
    )


def _evaluate(model: nn.Module) -> dict[str, float]:
    """Return loss and accuracy on the 360 images held out."""
    images, labels = _data()[1]
    outputs = model(images)
    right = (outputs.argmax(dim=1) == labels).float().mean().item()
    return {"loss": F.cross_entropy(outputs, labels).item(), "accuracy": right}


@cache
def _data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (images, labels) to train on, and (images, labels) held out; the split never changes."""
    from sklearn.datasets import load_digits  # takes half a second to import: only needed to train on digits

    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1797))
    held_out, rest = order[:_HELD_OUT], order[_HELD_OUT:]
    return (images[rest], labels[rest]), (images[held_out], labels[held_out])
