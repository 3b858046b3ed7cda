"""scikit-learn's handwritten digits with a small network, or with ResNet-18; if asked, with other classes on each rank.

1,797 grey images of 8×8 pixels that ship with scikit-learn: real handwriting, nothing to download.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from commhooks.experiments.tasks.images import (
    ResNet18,
    SmallCnn,
    SmallResNet,
    SmallVgg,
    classification_loss,
    evaluate_in_parts,
    sgd,
    warm_up_and_cosine,
)
from commhooks.experiments.tasks.sizes import asked_for, size_named
from commhooks.experiments.tasks.skew import Skewed
from commhooks.experiments.tasks.task import Task

_HELD_OUT = 360  # of 1,797: a fifth


@dataclass(frozen=True, kw_only=True)
class DigitsSize:
    """The size of the network and of its batch."""

    channels: int  # higher: a larger model
    batch_size: int  # images per rank and step
    steps: int
    network: str = "cnn"  # "mlp": two hidden layers with `channels` units, which take a tenth of the time


SIZES = {
    "tiny": DigitsSize(channels=128, batch_size=16, steps=160, network="mlp"),
    "small": DigitsSize(channels=8, batch_size=16, steps=40),
    "medium": DigitsSize(channels=32, batch_size=32, steps=80),
    "large": DigitsSize(channels=64, batch_size=64, steps=200),
}


class DigitsMlp(nn.Sequential):
    """Two hidden layers without batch norm: everything that it learns arrives as gradients."""

    def __init__(self, width: int) -> None:
        hidden = (nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        super().__init__(nn.Flatten(), *hidden, nn.Linear(width, 10))


_NETWORKS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "cnn": (SmallCnn, "a convolutional network with batch norm ({} channels in its first layer)"),
    "mlp": (DigitsMlp, "a perceptron with two hidden layers of {}"),
    "resnet": (SmallResNet, "a residual network with 13 convolutions in a row ({} channels in its first layer)"),
    "resnet18": (lambda channels: ResNet18(inputs=1), "ResNet-18 in its CIFAR form"),
    "vgg": (SmallVgg, "a plain network with 15 convolutions in a row ({} channels in its first layer)"),
}


def digits(
    size: str = "medium",
    *,
    network: str = "",
    channels: int = 0,
    batch_size: int = 0,
    steps: int = 0,
    skew: float = 0.0,
) -> Task:
    """Return handwritten digits with SGD and momentum; a 0 stands for the size's own value.

    Args:
        size: "tiny", "small", "medium" or "large".
        network: "cnn" (three convolutions), "mlp" (a perceptron), "vgg" (15 convolutions), "resnet" (13 beside
            shortcuts) or "resnet18", which has 11 million parameters in every size; empty: the size's own.
        channels: Channels of the first layer, or units of the mlp's hidden layers; resnet18 has its own.
        batch_size: Images per rank and step.
        steps: Optimizer steps of a run.
        skew: The fraction of the images, 0 to 1, that is sorted by label before the images are dealt out to the ranks.
            At 0 all ranks have the same mix of classes; at 1 each rank sees only its own classes.

    """
    preset = size_named(SIZES, size)
    shape = replace(preset, **asked_for(network=network, channels=channels, batch_size=batch_size, steps=steps))
    if shape.network == "resnet18" and channels:
        raise ValueError("channels cannot be chosen for resnet18, which has 64 in its first layer")
    if shape.network not in _NETWORKS:
        raise ValueError(f"network must be one of {', '.join(_NETWORKS)} (got {shape.network!r})")
    make, words = _NETWORKS[shape.network]
    training, held_out = _data()
    return Task(
        model=make(shape.channels),
        data=Skewed(*training, skew=skew, batch_size=shape.batch_size) if skew else TensorDataset(*training),
        held_out=TensorDataset(*held_out),
        loss=classification_loss,
        evaluate=lambda model: evaluate_in_parts([held_out], model),
        optimizer=sgd,
        schedule=warm_up_and_cosine,
        batch_size=shape.batch_size,
        steps=shape.steps,
        description=(
            "scikit-learn's handwritten digits (1,437 images to train on, 360 held out), "
            f"{words.format(shape.channels)}, SGD with momentum, {shape.batch_size} images per rank and step"
            f"{f', {skew:.0%} of the images sorted by label and dealt out to the ranks' if skew else ''}"
        ),
    )


@cache
def _data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (images, labels) to train on, and (images, labels) held out; the split never changes."""
    try:
        from sklearn.datasets import load_digits  # takes half a second to import: only needed to train on digits
    except ModuleNotFoundError as error:
        raise ValueError(
            "the images come with scikit-learn, which is not installed here: pip install scikit-learn"
        ) from error
    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1797))
    held_out, rest = order[:_HELD_OUT], order[_HELD_OUT:]
    return (images[rest], labels[rest]), (images[held_out], labels[held_out])
