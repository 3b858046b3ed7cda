"""The five kernels of synchronised batch normalisation that PyTorch has for GPUs only, for the suite's tests of it."""

from __future__ import annotations

import torch
from torch import Tensor


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1/sqrt(variance + eps) of every channel."""
    channels = _by_channel(x)
    return channels.mean(1), (channels.var(1, unbiased=False) + eps).rsqrt()


def gather_stats(
    x: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Join the ranks' statistics (one row a rank, one column a channel) into those of all elements.

    The running statistics are updated in place.
    """
    weights = (counts / counts.sum()).unsqueeze(1)
    mean = (weights * means).sum(0)
    variance = (weights * (inverses.pow(-2) - eps + (means - mean).square())).sum(0)
    if running_mean is not None and running_var is not None:
        unbiased = variance * (counts.sum() / (counts.sum() - 1))
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return mean, (variance + eps).rsqrt()


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    """Return (x - mean) * inverse * weight + bias, channel by channel."""
    y = (x - _like(mean, x)) * _like(inverse, x)
    if weight is not None:
        y = y * _like(weight, x)
    if bias is not None:
        y = y + _like(bias, x)
    return y.to(x.dtype)


def backward_reduce(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, for_x: bool, for_w: bool, for_b: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the sums over this rank of dy and of dy * (x - mean), and the gradients of weight and bias."""
    sum_dy = _by_channel(dy).sum(1)
    sum_dy_xmu = (_by_channel(dy) * (_by_channel(x) - mean.unsqueeze(1))).sum(1)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * inverse if for_w else None, sum_dy if for_b else None


def backward_input(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    """Return the gradient of x; the sums are those over all ranks."""
    n = counts.sum()
    centred = dy - _like(sum_dy / n, x) - (x - _like(mean, x)) * _like(inverse.square() * sum_dy_xmu / n, x)
    scale = inverse if weight is None else inverse * weight
    return (centred * _like(scale, x)).to(x.dtype)


def _by_channel(x: Tensor) -> Tensor:
    return x.float().transpose(0, 1).reshape(x.shape[1], -1)


def _like(channels: Tensor, x: Tensor) -> Tensor:
    return channels.reshape([-1] + [1] * (x.dim() - 2))


def provide() -> torch.library.Library:
    """Register the kernels for the CPU; they go when the library that is returned goes."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "batch_norm_stats": stats,
        "batch_norm_gather_stats_with_counts": gather_stats,
        "batch_norm_elemt": normalise,
        "batch_norm_backward_reduce": backward_reduce,
        "batch_norm_backward_elemt": backward_input,
    }.items():
        library.impl(name, kernel, "CPU")
    return library
