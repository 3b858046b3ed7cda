"""How a mean differs from that of what ranks sent, in words that tell a mistake."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commhooks.testing.workers import largest

_FITS = 1e-3
"""The relative distance at which one tensor is taken to be made of others."""


def difference(mean: Tensor, sent: Sequence[Tensor], allowed: float = 0.0, kept: Sequence[Tensor] = ()) -> str:
    """Return how a mean differs from the mean of what each rank sent, all float64; "" if by no more than is allowed.

    kept: each rank's residual, if it was not to be sent.
    """
    wanted = torch.stack([*sent]).mean(0)
    off = largest(mean - wanted)
    if off <= allowed:
        return ""
    weights = _weights(mean, sent)
    if weights and max(weights) - min(weights) <= _FITS:
        return f"the mean is {sum(weights):.3g} times that of what ranks sent"
    if weights:
        parts, ranks = (", ".join(map(str, numbers)) for numbers in ([f"{w:.2g}" for w in weights], range(len(sent))))
        return f"the mean is {parts} times what ranks {ranks} sent, in place of {1 / len(sent):.2g} times each"
    if kept and (said := _proportion(torch.stack([*kept]).mean(0), wanted, mean)):
        return said
    if missing := int(((mean == 0) & (wanted != 0)).sum()):
        return f"{missing} of the mean's {mean.numel()} elements are 0, and should not be"
    return f"the mean is off by {off / largest(wanted):.2g} of its largest element"


def _proportion(kept: Tensor, sent: Tensor, mean: Tensor) -> str:
    """Return how the ranks' mean residual differs from what the mean lacks; "" if it is no multiple of that."""
    unsent = sent + kept - mean
    times = float((kept * unsent).sum() / unsent.square().sum())
    if (kept - times * unsent).norm() > _FITS * unsent.norm():
        return ""
    return f"the residual is {times:.2g} times what was not sent" if times else "no residual is kept"


def _weights(mean: Tensor, sent: Sequence[Tensor]) -> list[float]:
    """Return how often each rank's tensor is in a mean; [] if it is made of something else."""
    if mean.numel() < 2 * len(sent):
        return []
    columns = torch.stack([one.flatten() for one in sent], 1)
    unit = columns.abs().amax()
    found = torch.linalg.lstsq(columns / unit, mean.flatten().unsqueeze(1) / unit, driver="gelsd").solution
    is_made_of_them = (columns @ found - mean.flatten().unsqueeze(1)).norm() <= _FITS * mean.norm()
    return [round(weight, 3) + 0.0 for weight in found.flatten().tolist()] if is_made_of_them else []
