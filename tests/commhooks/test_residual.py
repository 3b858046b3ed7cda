"""PowerSGD's residual on label-skewed data: what this rank did not get through stays bounded."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import commhooks
from commhooks.compressors.powersgd.orthonormal import orthonormal_rows
from tests.commhooks.workers import Workers, zeros
from tests.tiers import A_ROW

pytestmark = pytest.mark.kernels

RANKS, CLASSES, FEATURES, BATCH, STEPS = 4, 10, 32, 16, 800


Compress = Callable[[Tensor], tuple[Tensor, float]]
"""Takes every rank's gradient; returns their mean, and the largest norm of what a rank still owes."""


def ours() -> Compress:
    workers = Workers(commhooks.make_compressor("powersgd", rank=1), RANKS, zeros((CLASSES, FEATURES)))

    def step(gradients: Tensor) -> tuple[Tensor, float]:
        mean = workers.step([[gradient] for gradient in gradients])[0][0]
        return mean, max(float(workers.residual(rank, 0).norm()) for rank in range(RANKS))

    return step


def against_the_global_mean() -> Compress:
    """Do as PyTorch's hook does: keep M minus what all ranks got, not minus what this one sent."""
    residual, Q = torch.zeros(RANKS, CLASSES, FEATURES), torch.ones(1, FEATURES)

    def step(gradients: Tensor) -> tuple[Tensor, float]:
        M = gradients + residual
        P = orthonormal_rows((M @ Q.t()).mean(0).t())  # 1×n
        Q.copy_((P @ M).mean(0))
        mean = P.t() @ Q
        residual.copy_(M - mean)
        Q.div_(Q.norm())
        return mean, float(residual.flatten(1).norm(dim=1).max())

    return step


@A_ROW
def test_residuals_of_skewed_data_stay_as_they_are_while_those_against_the_global_mean_grow() -> None:
    """The second kind is what PyTorch's hook keeps; the mean over ranks of both is the same."""
    (own, our_loss), (theirs, their_loss) = _train(ours()), _train(against_the_global_mean())
    print(
        f"largest residual at steps 200 and {STEPS}: ours {own[200]:.2f}, {own[-1]:.2f}; "
        f"against the global mean {theirs[200]:.2f}, {theirs[-1]:.2f}; loss {our_loss:.3f}, {their_loss:.3f}"
    )
    # In four times the steps a random walk gets twice as far, and what always goes one way four times.
    assert max(own[200:]) < 2 * own[200]
    assert theirs[-1] > 2 * theirs[200]
    assert max(our_loss, their_loss) < math.log(CLASSES) / 2  # there is something to learn, and it was learnt


def _train(compress: Compress) -> tuple[list[float], float]:
    """Fit a softmax regression, each rank on three classes; return the largest residual by step, and the loss."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    classes_of = (torch.arange(3) * RANKS + torch.arange(RANKS)[:, None]) % CLASSES  # [rank, which]
    weight, norms, losses = torch.zeros(CLASSES, FEATURES), [], []
    for _ in range(STEPS):
        labels = classes_of.gather(1, torch.randint(0, 3, (RANKS, BATCH), generator=generator))
        inputs = centres[labels] + 2 * torch.randn(RANKS, BATCH, FEATURES, generator=generator)
        probabilities = (inputs @ weight.t()).softmax(2)
        truth = torch.nn.functional.one_hot(labels, CLASSES)
        mean, largest = compress((probabilities - truth).transpose(1, 2) @ inputs / BATCH)
        weight -= 0.1 * mean
        norms.append(largest)
        losses.append(float(-(probabilities * truth).sum(2).log().mean()))
    return norms, sum(losses[-100:]) / 100


@A_ROW
@pytest.mark.parametrize(("rank", "grows"), [(1, True), (2, False)])
def test_opposite_residuals_grow_only_if_the_basis_never_turns(rank: int, grows: bool) -> None:
    """A known limit: what two ranks owe in opposite directions is not sent while it lies outside their mean's basis.

    At rank 1 a mean of one constant direction holds the basis; another row of it has nothing to hold it, and turns.
    """
    workers = Workers(commhooks.make_compressor("powersgd", rank=rank), 2, zeros((20, 30)))
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(20, 1, generator=generator) @ torch.randn(1, 30, generator=generator)
    skew = torch.randn(20, 30, generator=generator)
    norms = []
    for _ in range(401):
        noise = 0.1 * torch.randn(2, 20, 30, generator=generator)
        workers.step([[mean + skew + noise[0]], [mean - skew + noise[1]]])
        norms.append(float(workers.residual(0, 0).norm()))
    # What grows by one amount a step doubles from step 200 to 400; what the first 20 steps did otherwise is 5 % of it.
    assert norms[400] == pytest.approx(2 * norms[200], rel=0.05) if grows else max(norms) < 2 * max(norms[:200])
