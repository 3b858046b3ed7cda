"""A task of your own: telling on which of two rings a point lies.

commhooks compare --task docs/examples/own_task.py:task --hook all-reduce --hook int8
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def task(width: int = 64):
    """Return model, data and loss; a setting: `own_task.py:task:width=128`."""
    angles, rings = 6.3 * torch.rand(2000), torch.randint(2, (2000,))
    circle = torch.stack([angles.cos(), angles.sin()], dim=1)
    points = (1 + rings)[:, None] * circle + 0.2 * torch.randn(2000, 2)
    model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def loss(model, batch):
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    return model, TensorDataset(points, rings), loss
