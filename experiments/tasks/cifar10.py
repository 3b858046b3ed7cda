"""CIFAR-10 from a folder in either of its published forms, with ResNet-18 or a small network.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009. It is not downloaded here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from .cifar_files import read_folder
from .images import ResNet18, SmallCnn, classification_loss, evaluate_in_parts, sgd, warm_up_and_cosine
from .task import Task

# Of the training images, by channel, as the literature rounds them.
_MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
_DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
_PADDING = 4
_AT_ONCE = 250  # test images


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Training images, each shifted by up to four pixels and mirrored at random, by torch's global generator."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        padded = F.pad(self.images[place], [_PADDING] * 4)
        top, left = torch.randint(2 * _PADDING + 1, (2,)).tolist()
        image = padded[:, top : top + 32, left : left + 32]
        return normalised(image.flip(-1) if torch.rand(()) < 0.5 else image), self.labels[place]


def normalised(images: Tensor) -> Tensor:
    """Return images of bytes as numbers with mean 0 and variance 1."""
    return (images / 255 - _MEAN) / _DEVIATION


def cifar10(
    folder: str = "",
    *,
    network: str = "resnet18",
    channels: int = 32,
    batch_size: int = 128,
    steps: int = 390,
    test_images: int = 1000,
) -> Task:
    """Return CIFAR-10 with SGD and momentum, from a folder that holds it.

    Args:
        folder: The folder of the unpacked archive, `cifar-10-batches-py` or `cifar-10-batches-bin`, or its parent.
        network: "resnet18" or "cnn" (three convolutions).
        channels: Channels of the cnn's first layer.
        batch_size: Images per rank and step.
        steps: Optimizer steps of a run; 390 steps of 128 images are an epoch.
        test_images: The number of test images in an evaluation, from the first on; 10,000 are all. Lower: faster.

    Raises:
        ValueError: The folder is missing or damaged, or a setting cannot work.

    """
    if network not in {"resnet18", "cnn"}:
        raise ValueError(f"network must be resnet18 or cnn (got {network!r})")
    for name, value in (("channels", channels), ("test_images", test_images)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1 (got {value})")
    (images, labels), test = read_folder(Path(folder).expanduser().resolve() if folder else None)
    test = (normalised(test[0][:test_images]), test[1][:test_images])
    words = "ResNet-18" if network == "resnet18" else f"a convolutional network with batch norm ({channels} channels)"
    return Task(
        model=ResNet18() if network == "resnet18" else SmallCnn(channels, inputs=3),
        data=Augmented(images, labels),
        held_out=list(zip(*test, strict=True)),
        loss=classification_loss,
        evaluate=partial(evaluate_in_parts, list(zip(*(part.split(_AT_ONCE) for part in test), strict=True))),
        optimizer=partial(sgd, lr=0.1),
        schedule=warm_up_and_cosine,
        batch_size=batch_size,
        steps=steps,
        description=(
            f"CIFAR-10 ({len(labels):,} images to train on, shifted and mirrored at random; {len(test[1]):,} to test), "
            f"{words}, SGD with momentum, {batch_size} images per rank and step"
        ),
    )
