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

from .task import Batch, Evaluation, generator_for, size_named

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


@dataclass(frozen=True)
class Digits:
    """Handwritten digits, SGD with momentum."""

    shape: DigitsSize
    size: str
    name: str = "digits"

    @classmethod
    def of_size(cls, size: str) -> Digits:
        """Return the task in one of its presets."""
        return cls(size_named(SIZES, size, "digits"), size)

    @property
    def default_steps(self) -> int:
        """How many steps a run takes by default."""
        return self.shape.steps

    @property
    def description(self) -> str:
        """One sentence for the report."""
        network = (
            f"a convolutional network with batch norm ({self.shape.channels} channels in its first layer)"
            if self.shape.convolutions
            else f"a perceptron with two hidden layers of {self.shape.channels}"
        )
        return (
            f"scikit-learn's handwritten digits (1,437 images to train on, 360 held out), {network}, SGD with "
            f"momentum, {self.shape.batch_size} images per rank and step"
        )

    @property
    def batch_size(self) -> int:
        """Examples per rank and step."""
        return self.shape.batch_size

    def with_batch_size(self, batch_size: int) -> Digits:
        """Return the same task with another batch size."""
        return replace(self, shape=replace(self.shape, batch_size=batch_size))

    def model(self, seed: int) -> nn.Module:
        """Return a fresh network."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return DigitsNet(self.shape.channels) if self.shape.convolutions else DigitsMlp(self.shape.channels)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD with Nesterov momentum."""
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)

    def learning_rate(self, step: int, steps: int) -> float:
        """Return a rate that rises over five steps and falls along a cosine."""
        return 0.05 * min(1.0, (step + 1) / 5) * (0.55 + 0.45 * math.cos(math.pi * step / steps))

    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Batch:
        """Return this rank's images of one step: every epoch is one shuffle, shared by all ranks."""
        images, labels = _data()[0]
        together = self.shape.batch_size * world_size
        if together > len(images):
            raise ValueError(
                f"digits: {world_size} ranks with {self.shape.batch_size} images each want more than the {len(images)} "
                "there are; use fewer ranks or a smaller size"
            )
        epoch, position = divmod(step, len(images) // together)
        order = torch.randperm(len(images), generator=generator_for(seed, epoch))
        begin = position * together + rank * self.shape.batch_size
        chosen = order[begin : begin + self.shape.batch_size]
        return Batch(images[chosen], labels[chosen])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(outputs, targets)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Evaluate the network on the 360 images held out."""
        images, labels = _data()[1]
        was_training = model.training
        model.eval()
        with torch.no_grad():
            outputs = model(images)
        model.train(was_training)
        right = (outputs.argmax(dim=1) == labels).float().mean().item()
        return Evaluation(loss=F.cross_entropy(outputs, labels).item(), accuracy=right)


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
