"""The networks, optimizer, schedule, loss and evaluation that the tasks on images share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commhooks.experiments.devices import moved


class SmallCnn(nn.Sequential):
    """Three convolutions with batch norm, then two linear layers; images of any size from 4×4 on."""

    def __init__(self, channels: int, inputs: int = 1) -> None:
        c = channels
        super().__init__(
            *(nn.Conv2d(inputs, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU()),
            *(nn.Conv2d(c, 2 * c, 3, padding=1, bias=False), nn.BatchNorm2d(2 * c), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(2 * c, 4 * c, 3, padding=1, bias=False), nn.BatchNorm2d(4 * c), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16 * c, 4 * c), nn.ReLU(), nn.Linear(4 * c, 10)),
        )


class _BasicBlock(nn.Module):
    """Two convolutions beside a shortcut, which is a 1×1 convolution if the shape changes."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if inputs != channels:
            self.shortcut.extend([nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)])

    def forward(self, x: Tensor) -> Tensor:
        """Return activations, N×channels×H/stride×W/stride, for activations, N×inputs×H×W."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Sequential):
    """The CIFAR form of ResNet-18: no pooling at the start, so that images of 32×32 keep their size in stage one.

    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016; 11,173,962 parameters with 3 input channels.
    """

    def __init__(self, inputs: int = 3, classes: int = 10) -> None:
        super().__init__(*_residual_layers(inputs, (64, 128, 256, 512), classes))


class SmallResNet(nn.Sequential):
    """ResNet-18 of any width, with three stages instead of four: 13 convolutions in a row, beside their shortcuts."""

    def __init__(self, channels: int, inputs: int = 1, classes: int = 10) -> None:
        super().__init__(*_residual_layers(inputs, (channels, 2 * channels, 4 * channels), classes))


class SmallVgg(nn.Sequential):
    """A deep network without shortcuts: three stages of five 3×3 convolutions with batch norm, and a linear layer.

    After Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015, with
    batch norm and a single linear layer, as is usual for CIFAR; for images of any size from 4×4 on.
    """

    def __init__(self, channels: int, inputs: int = 1, classes: int = 10) -> None:
        layers, before = list[nn.Module](), inputs
        for width in (channels, 2 * channels, 4 * channels):
            for _ in range(5):
                layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
                before = width
            layers.append(nn.MaxPool2d(2))
        layers[-1] = nn.AdaptiveAvgPool2d(1)
        super().__init__(*layers, nn.Flatten(), nn.Linear(before, classes))


def _residual_layers(inputs: int, stages: Sequence[int], classes: int) -> list[nn.Module]:
    """Return a residual network's layers: two blocks in each stage, whose numbers of channels are `stages`."""
    blocks, before = list[nn.Module](), stages[0]
    for channels in stages:
        blocks += [_BasicBlock(before, channels, channels // before), _BasicBlock(channels, channels, 1)]
        before = channels
    first = (nn.Conv2d(inputs, stages[0], 3, padding=1, bias=False), nn.BatchNorm2d(stages[0]), nn.ReLU())
    return [*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """Return SGD with Nesterov momentum."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4)


def warm_up_and_cosine(step: int, steps: int, warm_up: int = 5) -> float:
    """Return the factor of the learning rate: rising over the first steps, then falling to a tenth."""
    return min(1.0, (step + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch of images and labels."""
    return F.cross_entropy(model(batch[0]), batch[1])


def evaluate_in_parts(parts: Iterable[tuple[Tensor, Tensor]], model: nn.Module) -> dict[str, float]:
    """Return the mean loss and the accuracy over a set of images and labels that is given in parts."""
    loss, right, count = 0.0, 0, 0
    for images, labels in moved(list(parts), next(model.parameters()).device):
        outputs = model(images)
        loss += F.cross_entropy(outputs, labels, reduction="sum").item()
        right += int((outputs.argmax(dim=1) == labels).sum())
        count += len(labels)
    return {"loss": loss / count, "accuracy": right / count}
