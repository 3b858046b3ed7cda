"""Two tasks as a user would write them, for the repetitions of this study."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Batch = tuple[Tensor, Tensor]


class _Text(nn.Module):
    """A GPT of 1.3 million parameters on tokens of a vocabulary of 128."""

    def __init__(self, width: int = 160, layers: int = 4, context: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(128, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores, N×T×128, for tokens, N×T."""
        return self.head(self.blocks(self.token(tokens) + self.place.weight, self.mask))  # type: ignore[no-any-return]


def text(sequences: int = 1200) -> tuple[nn.Module, TensorDataset, object]:
    """Return next-token prediction on sequences of a random Markov chain of order two, whose rules must be learnt."""
    rules = torch.randint(128, (16, 128, 3))
    made = torch.randint(128, (sequences, 66))
    for place in range(2, 66):
        choice = torch.randint(3, (sequences,))
        made[:, place] = rules[made[:, place - 2] % 16, made[:, place - 1], choice]
    return _Text(), TensorDataset(made[:, :64], made[:, 1:65]), _loss


def points(width: int = 512) -> tuple[nn.Module, TensorDataset, object]:
    """Return a perceptron of 670,000 parameters, and points whose label is that of a random network."""
    points = torch.randn(4000, 768)
    teacher = nn.Sequential(nn.Linear(768, 32), nn.Tanh(), nn.Linear(32, 10))
    with torch.no_grad():
        labels = (4 * teacher(points)).argmax(dim=1)
    student = nn.Sequential(nn.Linear(768, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return student, TensorDataset(points, labels), _loss


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
